"""Registers the models with transformers and PEFT as soon as those are imported, and not before.

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


#: PEFT's tables of the layers that each of its methods adapts by default.
PEFT = "peft.utils.constants"
#: All matrices of a layer. IA3 scales keys, values and the input of the last feed-forward matrix.
PEFT_TARGETS = ["qkv", "out", "up", "down"]
PEFT_SPECIAL_TARGETS = {
    "TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING": ["qkv", "down"],
    "TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING": ["down"],
}


def register_with_transformers() -> None:
    """Registers now if the Auto classes and PEFT are imported, and otherwise when they are."""
    if AUTO in sys.modules:
        register_when_ready()
    if PEFT in sys.modules and not _is_being_imported(PEFT):
        register_with_peft()
    sys.meta_path.insert(0, _AfterImport())


def register_with_peft() -> None:
    """Lets PEFT adapt our models without `target_modules`."""
    for name, table in vars(sys.modules[PEFT]).items():
        # which norms a block has depends on its config, so norm tuning has no default
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MODULES_MAPPING") and "LNTUNING" not in name:
            table["bertblocks"] = PEFT_SPECIAL_TARGETS.get(name, PEFT_TARGETS)


def register_when_ready(executed: str = "") -> None:
    """Imports the models, which register themselves, unless an import in progress has to finish first."""
    ours = [name for name in sys.modules if name.startswith("bertblocks.")]
    in_progress = [name for name in (*NEEDED, *ours) if name != executed and _is_being_imported(name)]
    if AUTO in sys.modules and not in_progress:
        importlib.import_module("bertblocks.models")


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules above as Python does, and tries to register after each of them is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in (*NEEDED, PEFT):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if fullname == PEFT:
                register_with_peft()
            else:
                register_when_ready(executed=fullname)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
