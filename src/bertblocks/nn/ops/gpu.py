"""What a GPU and the installed packages can run, and torch's switch between versions of flash attention."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bertblocks.nn.layout import is_data_hidden

#: The modules that torch's switch imports, the packages that have them, and the compute capabilities they run on.
FLASH_IMPLEMENTATIONS = {
    "FA3": ("flash_attn_interface", "flash-attn-3", (9,)),
    "FA4": ("flash_attn.cute", "flash-attn-4", (9, 10)),
}


@dataclass(frozen=True)
class Gpu:
    """A CUDA device and the software on it, as the choice of kernels sees them."""

    capability: tuple[int, int]
    name: str = "this GPU"
    is_rocm: bool = False
    #: Whether torch has `varlen_attn` with windows, grouped heads and `num_splits`, which came with 2.13.
    has_varlen: bool = True
    #: What `varlen_attn` runs: FA2, or what `torch.nn.attention.activate_flash_attention_impl` chose.
    implementation: str = "FA2"
    #: The version of flash-attn 2. The package flash-attn-4 has the same module name and does not count.
    flash_attn: tuple[int, ...] | None = None
    has_flash_attn_4: bool = False
    has_triton: bool = True
    #: The bytes of shared memory that one program may have.
    shared_memory: int = 163 * 1024

    def write_capability(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}"


@cache
def installed_version(package: str) -> tuple[int, ...] | None:
    """Return the numbers of an installed package's version, such as (2, 8, 3), or None."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = (part for part in version.split("+")[0].split("."))
    return tuple(int(number) for number in numbers if number.isdigit())


@cache
def has_varlen_attention() -> bool:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return {"window_size", "enable_gqa", "num_splits"} <= set(inspect.signature(varlen_attn).parameters)


def current_implementation() -> str:
    """Return what torch's flash attention runs. torch has the switch since 2.11."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    return current() or "FA2"


def describe_gpu(device: torch.device) -> Gpu | None:
    """Return what a device can run, or None if it is not CUDA's."""
    if device.type != "cuda":
        return None
    return _describe_gpu(device, current_implementation())


@cache
def _describe_gpu(device: torch.device, implementation: str) -> Gpu:
    return Gpu(
        capability=torch.cuda.get_device_capability(device),
        name=torch.cuda.get_device_name(device),
        is_rocm=torch.version.hip is not None,
        has_varlen=has_varlen_attention(),
        implementation=implementation,
        flash_attn=installed_version("flash-attn"),
        has_flash_attn_4=installed_version("flash-attn-4") is not None,
        has_triton=importlib.util.find_spec("triton") is not None,
        # AMD's GPUs have 64 KB, and torch does not say so
        shared_memory=getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 * 1024),
    )


def why_not_triton(gpu: Gpu) -> str | None:
    """Return why Triton cannot run on a GPU, or None if it can."""
    if not gpu.has_triton:
        return "Triton is not installed"
    if not gpu.is_rocm and gpu.capability < (8, 0):
        return f"Triton needs compute capability 8.0 or newer, and {gpu.name} has {gpu.write_capability()}"
    return None


def own_kernels(kernel_backend: str, x: Tensor) -> Any:
    """Return the module `ops/fused.py` if its kernels run for this tensor, else None.

    While a graph is captured they do not, because compilers fuse these operations themselves.
    """
    if not x.is_cuda or kernel_backend == "torch" or x.dtype == torch.float64 or is_data_hidden(x):
        return None
    gpu = describe_gpu(x.device)
    if gpu is None or why_not_triton(gpu) is not None:
        return None
    from bertblocks.nn.ops import fused

    return fused


def use_flash_implementation(name: str, gpu: Gpu | None) -> None:
    """Switch torch's flash attention to FA3 or FA4, or raise an error that says what is missing."""
    module, package, majors = FLASH_IMPLEMENTATIONS[name]
    if gpu is None:
        raise ValueError(f"flash_attention is {name!r}, which needs CUDA.")
    if gpu.capability[0] not in majors:
        needed = " or ".join(f"{major}.x" for major in majors)
        have = gpu.write_capability()
        raise ValueError(
            f"flash_attention is {name!r}, which needs compute capability {needed}; {gpu.name} has {have}."
        )
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        raise ValueError(f"flash_attention is {name!r}, which needs torch 2.11 or newer; this is {torch.__version__}.")
    if importlib.util.find_spec(module.split(".")[0]) is None or importlib.util.find_spec(module) is None:
        raise ValueError(f"flash_attention is {name!r}, but the module {module} is missing; install {package}.")
    torch.nn.attention.activate_flash_attention_impl(name)
