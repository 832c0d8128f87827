"""What a result depends on besides the code: the machine, its memory, the versions, the command and the data."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from bertblocks import __version__
from bertblocks.core.cpu import allowed_cpus, cpu_flags, cpu_info
from bertblocks.core.storage import checksum, list_files

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import torch

#: Libraries whose versions can change a result.
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
#: Instructions that decide which kernels run.
INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp")


def describe_machine() -> dict[str, str | int]:
    """The processor, the CPUs that the process may use, and the system."""
    notable = [flag for flag in INSTRUCTIONS if flag in cpu_flags()]
    return {
        "processor": cpu_info().get("model name") or platform.processor() or platform.machine(),
        "cores": allowed_cpus(),
        "instructions": ", ".join(notable),
        "system": f"{platform.system()} {platform.machine()}",
    }


def peak_memory(device: torch.device) -> int | None:
    """The most bytes so far: of tensors on a GPU, or of the whole process on a CPU. None if the system does not tell.

    Example:
        >>> import torch
        >>> peak_memory(torch.device("cpu")) > 10 * 2**20
        True
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # getrusage would start at the peak of the process that started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    if resource is None:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def describe_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The version of Python and of each package; "missing" if one is not installed."""
    found = {"python": sys.version.split()[0], "bertblocks": __version__}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def describe_command() -> str:
    """The command line of this process, as a shell reads it."""
    program = Path(sys.argv[0]).name
    words = ["bertblocks" if program in ("bertblocks", "__main__.py") else program, *sys.argv[1:]]
    processes = os.environ.get("WORLD_SIZE", "1")
    launcher = [] if processes == "1" else ["torchrun", "--nproc-per-node", processes, "-m"]
    return shlex.join([*launcher, *words])


def hash_files(sources: Iterable[str | Path | None]) -> dict[str, str]:
    """The SHA-256 of each source: a file, a folder, or a pattern of several files. Names of datasets have none.

    Example:
        >>> hash_files([None, "glue:rte"])
        {}
    """
    found = {}
    for source in sources:
        if source is None:
            continue
        paths = [Path(source)] if Path(source).exists() else [Path(name) for name in sorted(glob.glob(str(source)))]
        files = [file for path in paths for file in (list_files(path) if path.is_dir() else [path])]
        if len(files) == 1:
            found[str(source)] = checksum(files[0])
        elif files:
            listing = "".join(f"{file.name} {checksum(file)}\n" for file in files)
            found[str(source)] = hashlib.sha256(listing.encode()).hexdigest()
    return found
