"""Registers the models with transformers' Auto classes as soon as those are imported, and not before.

Importing transformers' models takes seconds, which `import bertblocks` and `bertblocks --help` should not.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

AUTO = "transformers.models.auto.configuration_auto"
#: Modules that our models import. While one of them is still being executed, importing ours would be circular.
NEEDED = (
    AUTO,
    "transformers.models.auto.auto_factory",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "bertblocks.config",
    "bertblocks.nn.block",
)


def register_with_transformers() -> None:
    """Now if the Auto classes are there, otherwise when they come."""
    if AUTO in sys.modules:
        register_when_ready()
    sys.meta_path.insert(0, _AfterImport())


def register_when_ready(executed: str = "") -> None:
    """Imports the models, which register themselves, unless that has to wait for an import under way."""
    ours = [name for name in sys.modules if name.startswith("bertblocks.")]
    under_way = [name for name in (*NEEDED, *ours) if name != executed and _is_being_imported(name)]
    if AUTO in sys.modules and not under_way:
        importlib.import_module("bertblocks.models")


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules above as Python would, and tries to register after each was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NEEDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            register_when_ready(executed=fullname)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
