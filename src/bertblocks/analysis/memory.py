"""Activation memory, counted by running a model on the meta device, where tensors have sizes but take no memory.

The numbers are for one sequence without padding in fp32, without weights. Attention is assumed to be a fused kernel
such as flash-attn, which stores no score matrix: only its inputs, its output and, for training, one number per head
and query. Everything else is what the model's own code stores. Dropout stores its mask as floats, as torch does on CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.attention import Attention
from bertblocks.nn.backends import AttentionBackend, AttentionContext
from bertblocks.nn.rope import RotaryPosition

#: The share of tokens that reach the masked-LM head in training, as in ModernBERT's recipe.
LABELLED_SHARE = 0.3


def inference_bytes(model: BertBlocksPreTrainedModel, length: int) -> int:
    """Returns the peak of live activation bytes, including the output."""
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    was_training = model.training
    model.eval()
    with torch.no_grad(), _fused_attention(model), _LiveBytes(model) as live:
        model(ids)
    model.train(was_training)
    return live.peak


def training_bytes(model: BertBlocksPreTrainedModel, length: int) -> int:
    """Returns the bytes that a forward pass keeps for its backward pass.

    The masked-LM head gets `LABELLED_SHARE` of the tokens, and its loss is included. The losses of other heads are too
    small to matter.
    """
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    weights = _weight_storages(model)
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in weights:
            saved[id(storage)] = storage
        return tensor.detach()

    was_training = model.training
    model.train()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.enable_grad(), _fused_attention(model), hooks:
        if isinstance(model, LanguageModel):
            labelled = torch.zeros(max(1, round(LABELLED_SHARE * length)), dtype=torch.long, device="meta")
            model.fused_loss(model.model.encode(ids, token_indices=lambda _: labelled).hidden, ids[0, labelled])
        else:
            model(ids)
    model.train(was_training)
    return sum(storage.nbytes() for storage in saved.values())


def _weight_storages(model: BertBlocksPreTrainedModel) -> set[int]:
    """Returns the ids of the storages of weights. The Python object of a storage lives as long as the storage."""
    return {id(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}


# ---------------------------------------------------------------------- live tensors


class _LiveBytes(TorchDispatchMode):
    """Tracks every new tensor and the peak of live bytes after any operation."""

    def __init__(self, model: BertBlocksPreTrainedModel) -> None:
        super().__init__()
        self.known = _weight_storages(model)
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in self.known:
                self.known.add(id(storage))
                self.live += storage.nbytes()
                weakref.finalize(storage, self._release, id(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


# ---------------------------------------------------------------------- fused attention


class _Fused(torch.autograd.Function):
    """The output shape of a fused attention kernel, and the tensors that it keeps for training."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)  # [tokens, heads, head_dim]
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out


class _FusedBackend(AttentionBackend):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        return _Fused.apply(q, k, v)


@contextmanager
def _fused_attention(model: BertBlocksPreTrainedModel) -> Iterator[None]:
    """Gives every attention block of `model` the fused backend, and turns off RoPE scaling.

    Scaling does not change sizes, and some kinds read a length from a tensor, which has no value on the meta device.
    """

    def swap(module: nn.Module, args: tuple) -> tuple:
        x, context, *rest = args
        return (x, replace(context, backend=_FusedBackend()), *rest)

    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    rotations = [module for module in model.modules() if isinstance(module, RotaryPosition)]
    scalings = [rotation.scaling for rotation in rotations]
    handles = [attention.register_forward_pre_hook(swap) for attention in attentions]
    for rotation in rotations:
        rotation.scaling = None
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for rotation, scaling in zip(rotations, scalings, strict=True):
            rotation.scaling = scaling
