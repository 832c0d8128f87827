"""What needs an extra is collected where the extra is installed."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("jax") and find_spec("flax") else ["src/bertblocks/flax/*", "tests/test_flax_*.py"]
)
