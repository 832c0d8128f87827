"""What the C kernels take: their structs, and the packed weights and descriptions of sequences behind them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Layer(ctypes.Structure):
    """The struct `Layer` of product.h: a packed matrix with its sums, scales and bias."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    ]


class Norm(ctypes.Structure):
    """The struct `Norm` of rows.h."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("is_rms", ctypes.c_int32),
    ]


class EncoderLayer(ctypes.Structure):
    """The struct `EncoderLayer` of layer.h, with its feed-forward network."""

    _fields_ = [
        ("qkv", ctypes.POINTER(Layer)),
        ("out", ctypes.POINTER(Layer)),
        ("up", ctypes.POINTER(Layer)),
        ("down", ctypes.POINTER(Layer)),
        ("activation", ctypes.c_int),
        ("gated", ctypes.c_int),
        ("attention_in", ctypes.POINTER(Norm)),
        ("attention_out", ctypes.POINTER(Norm)),
        ("mlp_in", ctypes.POINTER(Norm)),
        ("mlp_out", ctypes.POINTER(Norm)),
    ]


class Attention(ctypes.Structure):
    """The struct `Attention` of attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride", "out_stride")),
        ("starts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sequences", "longest", "origin")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int32) for name in ("rotary", "heads", "kv_heads", "size")),
        *((name, ctypes.c_int32) for name in ("half_window", "is_bf16", "in_bf16")),
        ("scale", ctypes.c_float),
    ]


class Training(ctypes.Structure):
    """The struct `Training` of training.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gradient", "of_q", "of_k", "of_v")),
        *((name, ctypes.c_int64) for name in ("of_q_stride", "of_k_stride", "of_v_stride")),
        ("seed", ctypes.c_uint64),
        ("rate", ctypes.c_float),
    ]


class Units(ctypes.Structure):
    """The struct `Units` of rows.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("up", "gradient", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "size")),
        *((name, ctypes.c_int32) for name in ("activation", "gated", "is_bf16")),
    ]


class Loss(ctypes.Structure):
    """The struct `Loss` of loss.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "labels", "row_weights", "losses", "denominators", "sums")),
        *((name, ctypes.c_int64) for name in ("rows", "size")),
        ("z_loss", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    ]


class AttentionCall:
    """What attention needs to know about sequences and heads; it keeps the tensors alive that the struct points into.

    `rotary` are the tables of cosines `[tokens, 1, rotated]` and sines `[tokens, 1, rotated / 2]`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        kv_heads: int,
        size: int,
        scale: float,
        half_window: int | None,
        in_bf16: bool,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.starts = torch.tensor([0, *lengths]).cumsum(0)
        self.longest = max(lengths)
        self.tables = None if rotary is None else tuple(table.float().contiguous() for table in rotary)
        call = self.struct = Attention(starts=self.starts.data_ptr(), sequences=len(lengths), longest=self.longest)
        if self.tables is not None:
            cos, sin = self.tables
            call.cos, call.sin, call.rotary = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        call.heads, call.kv_heads, call.size = heads, kv_heads, size
        call.scale, call.half_window, call.in_bf16 = scale, -1 if half_window is None else half_window, in_bf16
        #: The memory that large encoder layers work in; the calls of a forward pass should share one dict.
        self.memory: dict[str, Tensor] = {}

    def point_to(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Give the struct `[tokens, heads, size]` in fp32 or bf16, whose heads and units are contiguous."""
        struct = self.struct
        struct.q, struct.k, struct.v, struct.out = (x.data_ptr() for x in (q, k, v, out))
        struct.q_stride, struct.k_stride, struct.v_stride = q.stride(0), k.stride(0), v.stride(0)
        struct.out_stride, struct.is_bf16 = out.stride(0), q.dtype == torch.bfloat16

    def split(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, or if one tensor `[tokens, width]` holds all three, views of its parts."""
        if len(tensors) == 1:
            heads = self.struct.heads, self.struct.kv_heads, self.struct.kv_heads
            parts = tensors[0].split([count * self.struct.size for count in heads], dim=-1)
            tensors = [part.unflatten(-1, (count, -1)) for part, count in zip(parts, heads, strict=True)]
        q, k, v = tensors
        return q, k, v


class MemoryOrder(NamedTuple):
    """How a kernel wants a matrix: panels of some outputs, in each a group of inputs at a time."""

    panel: int
    group: int
    #: What the inputs are filled up to a multiple of.
    inputs: int


class PackedLayer:
    """A layer in a kernel's memory order; it keeps the tensors alive that the struct points into."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, order: MemoryOrder) -> None:
        outputs, inputs = weight.shape
        rows, columns = -(-outputs // order.panel) * order.panel, -(-inputs // order.inputs) * order.inputs
        matrix = torch.zeros(rows, columns, dtype=torch.int8)
        matrix[:outputs, :inputs] = weight
        panels = matrix.view(-1, order.panel, columns // order.group, order.group).transpose(1, 2)
        self.weight = panels.contiguous()
        self.sums = matrix.sum(1, dtype=torch.int32)
        self.scales, self.bias = torch.zeros(rows), torch.zeros(rows)
        self.scales[:outputs] = scales
        if bias is not None:
            self.bias[:outputs] = bias
        pointers = (tensor.data_ptr() for tensor in (self.weight, self.sums, self.scales, self.bias))
        self.layer = Layer(*pointers, inputs, outputs)
        self.reference = ctypes.byref(self.layer)


#: Weight, bias, epsilon, and whether it is an RMS norm; without epsilon there is no norm.
NormParts = tuple[Tensor | None, Tensor | None, float | None, bool]


class PackedEncoderLayer:
    """An encoder layer for the kernel: its matrices, and the norms before and after its two sublayers."""

    def __init__(
        self,
        layers: Sequence[PackedLayer],
        activation: int,
        gated: bool,
        norms: Sequence[NormParts],
    ) -> None:
        self.layers, self.norms = layers, norms
        pointers = [None if norm[2] is None else ctypes.pointer(_norm(*norm)) for norm in norms]
        self.struct = EncoderLayer(*(ctypes.pointer(layer.layer) for layer in layers), activation, gated, *pointers)


def _norm(weight: Tensor | None, bias: Tensor | None, epsilon: float | None, is_rms: bool) -> Norm:
    return Norm(*(None if tensor is None else tensor.data_ptr() for tensor in (weight, bias)), epsilon, is_rms)
