"""Raises an error that names the missing package; imported before any module that needs it."""

from importlib.util import find_spec

for package in ("jax", "flax"):
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"bertblocks.flax needs {package}, which is not installed: pip install 'bertblocks[jax]'.", name=package
        )
