"""The C kernels: from the wheel, or compiled at first use and cached in the user's folder; loaded with ctypes.

Without a suitable CPU or a compiler, torch computes the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading
from pathlib import Path

import torch
from torch import Tensor

from bertblocks.core.c_library import CompileError, compiled_library
from bertblocks.core.cpu import cpu_flags, is_amx_broken
from bertblocks.nn.ops.kernel_arguments import (
    Attention,
    AttentionCall,
    EncoderLayer,
    Layer,
    Loss,
    MemoryOrder,
    PackedEncoderLayer,
    PackedLayer,
    Training,
    Units,
)
from bertblocks.nn.ops.linear import is_plain
from bertblocks.nn.ops.targets import OPTIONS, TARGETS

SOURCE = Path(__file__).with_name("kernels.c")
#: The kernel's codes for activations.
RELU, SILU, GELU, GELU_TANH = range(4)
#: The largest head that the attention kernel reads.
MAX_HEAD_SIZE = 256
#: Tokens whose queries, keys and values an encoder layer holds at a time, unless a single sequence is longer.
GROUP_TOKENS = 1024
#: How much memory for encoder layers a thread keeps.
KEPT_BYTES = 2**25


class KernelError(RuntimeError):
    """Says why this machine cannot run the kernel."""


class Kernel:
    """Calls the compiled library on as many threads as torch uses. Its name is that of its target."""

    def __init__(self, path: Path, name: str) -> None:
        library, self.name = ctypes.CDLL(str(path)), name
        if not library.bertblocks_prepare():
            raise OSError("the system does not let this process use the instructions")
        parts = (ctypes.c_int32.in_dll(library, f"bertblocks_{part}").value for part in MemoryOrder._fields)
        self.order = MemoryOrder(*parts)
        layer, pointer, number = ctypes.POINTER(Layer), ctypes.c_void_p, ctypes.c_int64
        self._linear = library.bertblocks_linear
        self._linear.argtypes = [layer, pointer, number, pointer, ctypes.c_int]
        self._mlp = library.bertblocks_mlp
        self._mlp.argtypes = [layer, layer, ctypes.c_int, ctypes.c_int, pointer, number, pointer, ctypes.c_int]
        self._attention = library.bertblocks_attention
        self._attention.argtypes = [ctypes.POINTER(Attention), ctypes.c_int]
        self._train_attention = library.bertblocks_train_attention
        self._train_attention.argtypes = [ctypes.POINTER(Attention), ctypes.POINTER(Training), ctypes.c_int]
        self._activation, self._cross_entropy = library.bertblocks_activation, library.bertblocks_cross_entropy
        self._activation.argtypes = [ctypes.POINTER(Units), ctypes.c_int]
        self._cross_entropy.argtypes = [ctypes.POINTER(Loss), ctypes.c_int]
        self._dropout = library.bertblocks_dropout
        self._dropout.argtypes = [
            *(pointer, pointer, number, ctypes.c_int),
            *(ctypes.c_uint64, ctypes.c_float, ctypes.c_int),
        ]
        for function in (self._activation, self._cross_entropy, self._dropout):
            function.restype = None
        encoder_layer, call = ctypes.POINTER(EncoderLayer), ctypes.POINTER(Attention)
        self._layer_bytes = library.bertblocks_layer_bytes
        self._layer_bytes.argtypes, self._layer_bytes.restype = [encoder_layer, call, number, ctypes.c_int], number
        self._layer = library.bertblocks_layer
        self._layer.argtypes = [
            *(encoder_layer, call, pointer, pointer, pointer),
            *(number, number, pointer, ctypes.c_int),
        ]
        self._layer.restype = None
        self._kept = threading.local()

    def pack(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> PackedLayer:
        """Bring an int8 matrix `[outputs, inputs]` with a scale for each output into the kernel's memory order."""
        return PackedLayer(weight, scales, bias, self.order)

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

    def attention(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Attend over `[tokens, heads, size]` in fp32 or bf16, whose heads and units are contiguous."""
        out = torch.empty(q.shape, dtype=q.dtype)
        call.point_to(q, k, v, out)
        if not self._attention(call.struct, torch.get_num_threads()):
            raise MemoryError(f"Not enough memory for attention over {len(q)} tokens.")
        return out

    def attention_with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, rate: float, seed: int
    ) -> Tensor:
        """Attend as `attention` does, with dropout on the weights that the seed decides."""
        out = torch.empty(q.shape, dtype=q.dtype)
        call.point_to(q, k, v, out)
        self._train(call, Training(seed=seed, rate=rate))
        return out

    def attention_gradients(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        results: tuple[Tensor, Tensor, Tensor],
        gradient: Tensor,
        call: AttentionCall,
        rate: float,
        seed: int,
    ) -> None:
        """Write the gradients of q, k and v into the results for that of the output, with the same dropout."""
        gradient = gradient.contiguous()
        call.point_to(*inputs, gradient)
        strides = (x.stride(0) for x in results)
        self._train(call, Training(gradient.data_ptr(), *(x.data_ptr() for x in results), *strides, seed, rate))

    def _train(self, call: AttentionCall, training: Training) -> None:
        if not self._train_attention(call.struct, training, torch.get_num_threads()):
            raise MemoryError(f"Not enough memory for attention over sequences of {call.longest} tokens.")

    def activate(self, up: Tensor, activation: int, gated: bool) -> Tensor:
        """Apply an activation to contiguous fp32 or bf16 rows, or if gated to their first half, times the other."""
        out = torch.empty(*up.shape[:-1], up.shape[-1] // (2 if gated else 1), dtype=up.dtype)
        self._run_units(up, None, out, activation, gated)
        return out

    def activation_gradient(self, up: Tensor, gradient: Tensor, activation: int, gated: bool) -> Tensor:
        """Return the gradient of `up` for that of the result of `activate`."""
        out = torch.empty(up.shape, dtype=up.dtype)
        self._run_units(up, gradient.contiguous(), out, activation, gated)
        return out

    def _run_units(self, up: Tensor, gradient: Tensor | None, out: Tensor, activation: int, gated: bool) -> None:
        size = up.shape[-1] // (2 if gated else 1)
        pointers = (None if x is None else x.data_ptr() for x in (up, gradient, out))
        rows = up.numel() // up.shape[-1]
        units = Units(*pointers, rows, size, activation, gated, up.dtype == torch.bfloat16)
        self._activation(units, torch.get_num_threads())

    def drop(self, x: Tensor, rate: float, seed: int) -> Tensor:
        """Multiply contiguous fp32 or bf16 numbers by factors of dropout that the seed decides."""
        out = torch.empty(x.shape, dtype=x.dtype)
        pointers = x.data_ptr(), out.data_ptr()
        self._dropout(*pointers, x.numel(), x.dtype == torch.bfloat16, seed, rate, torch.get_num_threads())
        return out

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, row_weights: Tensor, z_loss: float, wants_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the rows' losses and the contiguous logits, whose place their gradient takes if it is wanted.

        The sum of the gradients over the rows, with their weights, comes third.
        """
        rows, size = logits.shape
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= size:
            raise IndexError(f"labels reach from {least} to {most}, logits from 0 to {size - 1}")
        labels, row_weights = labels.contiguous(), row_weights.float().contiguous()
        losses, denominators = torch.empty(rows), torch.empty(rows)
        sums = torch.zeros(size) if wants_gradient else None
        tensors = logits, labels, row_weights, losses, denominators, sums
        pointers = (None if x is None else x.data_ptr() for x in tensors)
        loss = Loss(*pointers, rows, size, z_loss, logits.dtype == torch.bfloat16)
        self._cross_entropy(loss, torch.get_num_threads())
        return losses, logits, sums

    def _memory(self, size: int, call: AttentionCall) -> Tensor:
        """Return memory to work in: this thread's own, or if it is large, that of all layers of a forward pass.

        New memory is slow, because the system has to clear it page by page.
        """
        kept = getattr(self._kept, "memory", None) if size <= KEPT_BYTES else call.memory.get("memory")
        if kept is None or len(kept) < size:
            kept = torch.empty(size, dtype=torch.uint8)
            if size <= KEPT_BYTES:
                self._kept.memory = kept
            else:
                call.memory["memory"] = kept
        return kept

    def layer(self, x: Tensor, layer: PackedEncoderLayer, call: AttentionCall, selected: Tensor | None) -> Tensor:
        """Run an encoder layer on fp32 rows and return all tokens or the selected ones."""
        threads, tokens = torch.get_num_threads(), len(x)
        group = tokens if selected is not None else max(min(tokens, GROUP_TOKENS), call.longest)
        memory = self._memory(self._layer_bytes(layer.struct, call.struct, group, threads), call)
        out = torch.empty(tokens if selected is None else len(selected), x.shape[1])
        pointers = x.data_ptr(), out.data_ptr(), None if selected is None else selected.data_ptr()
        self._layer(layer.struct, call.struct, *pointers, len(out), group, memory.data_ptr(), threads)
        return out


def runnable_targets() -> dict[str, dict[str, str]]:
    """Return the targets whose instructions this CPU has, the fastest first."""
    targets, flags = TARGETS[SOURCE.name].get(platform.machine(), {}), cpu_flags()
    if is_amx_broken():
        flags -= {"amx_tile"}
    return {name: options for name, options in targets.items() if options.keys() <= flags}


def load_kernel(name: str, options: dict[str, str]) -> Kernel:
    """Return the kernel of a target; a CompileError or OSError says why it cannot be built or loaded here."""
    with compiled_library(SOURCE, [*OPTIONS, *options.values()]) as path:
        return Kernel(path, name)


@functools.cache
def find_kernel() -> Kernel | KernelError:
    """Return the fastest kernel, or the reason why there is none."""
    reasons = []
    for name, options in runnable_targets().items():
        try:
            return load_kernel(name, options)
        except (CompileError, OSError) as error:  # an OSError if the library needs another one, such as OpenMP's
            reasons.append(f"{name}: {error}")
    return KernelError("; ".join(reasons) or _missing_instructions())


def _missing_instructions() -> str:
    targets = list(TARGETS[SOURCE.name].get(platform.machine(), {}).values())
    if not targets:
        return f"there is none for {platform.machine() or 'this processor'}"
    return f"this CPU has no {', '.join(sorted(targets[-1].keys() - cpu_flags()))}"


def kernel_for(x: Tensor) -> Kernel | None:
    """Return the kernel if it can read x: plain fp32 or bf16 numbers on the CPU, outside graph capture."""
    if x.dtype not in (torch.float32, torch.bfloat16) or not x.numel() or not is_plain(x):
        return None
    kernel = find_kernel()
    return kernel if isinstance(kernel, Kernel) else None


def describe() -> str:
    """Describe the int8 kernel that this machine runs.

    Example:
        >>> describe().startswith("int8: ")
        True
    """
    kernel = find_kernel()
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    if isinstance(kernel, Kernel):
        return f"int8: C kernel, {kernel.name}, {threads}"
    return f"int8: torch, {threads} (no C kernel: {kernel})"
