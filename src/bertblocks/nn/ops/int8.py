"""The int8 C kernel: compiled for this machine at first use, cached in the user's folder, and loaded with ctypes.

Without a suitable CPU or a compiler, torch computes the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from bertblocks.core.c_library import CompileError, compiled_library
from bertblocks.core.cpu import cpu_flags

SOURCE = Path(__file__).with_name("int8.c")
#: The instruction sets that the kernel needs: Linux' names and the compiler's options.
CPU_FLAGS = {
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl",
    "avx512_vnni": "-mavx512vnni",
}
OPTIONS = ["-O3", "-std=gnu11", "-fopenmp", "-fPIC", "-shared", *CPU_FLAGS.values()]
#: The memory order of a matrix: panels of this many outputs, four inputs at a time.
PANEL, QUAD = 32, 4
#: The kernel's codes for activations.
RELU, SILU, GELU, GELU_TANH = range(4)


class KernelError(RuntimeError):
    """Says why this machine cannot run the kernel."""


class Layer(ctypes.Structure):
    """The struct `Layer` of int8.c: a packed matrix with its sums, scales and bias."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    ]


class PackedLayer:
    """A layer in the kernel's memory order; it keeps the tensors alive that the struct points into."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        outputs, inputs = weight.shape
        rows, columns = -(-outputs // PANEL) * PANEL, -(-inputs // QUAD) * QUAD
        matrix = torch.zeros(rows, columns, dtype=torch.int8)
        matrix[:outputs, :inputs] = weight
        panels = matrix.view(rows // PANEL, PANEL, columns // QUAD, QUAD).transpose(1, 2)
        # torch aligns memory to 64 bytes, which the kernel's loads rely on
        self.weight = panels.contiguous()
        self.sums = matrix.sum(1, dtype=torch.int32)
        self.scales, self.bias = torch.zeros(rows), torch.zeros(rows)
        self.scales[:outputs] = scales
        if bias is not None:
            self.bias[:outputs] = bias
        pointers = (tensor.data_ptr() for tensor in (self.weight, self.sums, self.scales, self.bias))
        self.layer = Layer(*pointers, inputs, outputs)
        self.reference = ctypes.byref(self.layer)


class Kernel:
    """Calls the compiled library on as many threads as torch uses."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        layer, pointer, number = ctypes.POINTER(Layer), ctypes.c_void_p, ctypes.c_int64
        self._linear = library.bertblocks_linear
        self._linear.argtypes = [layer, pointer, number, pointer, ctypes.c_int]
        self._mlp = library.bertblocks_mlp
        self._mlp.argtypes = [layer, layer, ctypes.c_int, ctypes.c_int, pointer, number, pointer, ctypes.c_int]

    def linear(self, x: Tensor, packed: PackedLayer) -> Tensor:
        """Compute x W^T + bias for fp32 rows."""
        out = torch.empty(x.shape[0], packed.layer.outputs)
        if not self._linear(packed.reference, x.data_ptr(), x.shape[0], out.data_ptr(), torch.get_num_threads()):
            raise MemoryError(f"Not enough memory for {x.shape[0]} int8 rows.")
        return out

    def mlp(self, x: Tensor, up: PackedLayer, down: PackedLayer, activation: int, gated: bool) -> Tensor:
        """Compute the feed-forward network, holding hidden units for only a few rows at a time."""
        out = torch.empty(x.shape[0], down.layer.outputs)
        pointers = (x.data_ptr(), x.shape[0], out.data_ptr())
        if not self._mlp(up.reference, down.reference, activation, gated, *pointers, torch.get_num_threads()):
            raise MemoryError(f"Not enough memory for {x.shape[0]} int8 rows.")
        return out


@functools.cache
def find_kernel() -> Kernel | KernelError:
    """Return the kernel, or the reason why there is none."""
    if missing := CPU_FLAGS.keys() - cpu_flags():
        return KernelError(f"this CPU has no {', '.join(sorted(missing))}")
    try:
        with compiled_library(SOURCE, OPTIONS) as path:
            return Kernel(path)
    except (CompileError, OSError) as error:  # an OSError if the library needs another one, such as OpenMP's
        return KernelError(str(error))


def describe() -> str:
    """Describe the int8 kernel that this machine runs.

    Example:
        >>> describe().startswith("int8: ")
        True
    """
    kernel = find_kernel()
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    if isinstance(kernel, Kernel):
        return f"int8: C kernel, AVX512-VNNI, {threads}"
    return f"int8: torch, {threads} (no C kernel: {kernel})"
