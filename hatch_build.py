"""Compiles the C kernels into wheels for Linux on x86-64 and ARM, so that installed packages need no compiler.

Without a compiler, and elsewhere, the wheel is pure Python: kernels are then compiled at first use, or torch computes.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
OPERATIONS = Path("bertblocks", "nn", "ops")


class KernelHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or platform.system() != "Linux":
            return
        sys.path.insert(0, str(ROOT / "src"))
        from bertblocks.core.c_library import CompileError, compile_source, library_name
        from bertblocks.nn.ops.targets import OPTIONS, TARGETS

        self.scratch = tempfile.TemporaryDirectory(prefix="bertblocks-")
        machine = platform.machine()
        for name, target in ((name, target) for name, of in TARGETS.items() for target in of.get(machine, {}).values()):
            source, options = ROOT / "src" / OPERATIONS / name, [*OPTIONS, *target.values()]
            try:
                content, _ = compile_source(source, options, Path(self.scratch.name))
            except CompileError as error:
                self.app.display_warning(f"{name} is not prebuilt: {error}")
                continue
            library = Path(self.scratch.name, library_name(source, options))
            library.write_bytes(content)
            build_data["force_include"][str(library)] = str(OPERATIONS / library.name)
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-linux_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "scratch"):
            self.scratch.cleanup()
