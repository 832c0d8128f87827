"""Installed packages that extend BertBlocks.

A package declares a module that registers its objects, in its own pyproject.toml:

    [project.entry-points."bertblocks"]
    my_blocks = "my_package.blocks"

No recipe, config or checkpoint can name a module to import: only installing a package makes its code run.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from bertblocks.core.messages import InputError

#: The group of entry points.
GROUP = "bertblocks"


@cache
def load_plugins() -> tuple[str, ...]:
    """Imports the declared modules of all installed packages, once. Returns their names."""
    modules = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.value):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else "a package"
            problem = f"The entry point {entry.name!r} of {package} failed ({type(error).__name__}: {error})"
            raise InputError(f"{problem}; mend or uninstall {package}.") from error
        modules.append(entry.value)
    return tuple(modules)
