"""What `run.compile` compiles, and what gradient checkpointing keeps."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bertblocks.core.log import logger
from bertblocks.nn.attention import Attention
from bertblocks.nn.backends.graph import is_opaque
from bertblocks.nn.backends.kernels import AttentionCall, choose_kernel
from bertblocks.nn.encoder import Encoder
from bertblocks.nn.moe import MixtureOfExperts
from bertblocks.nn.ops.gpu import Gpu, describe_gpu

#: Half precision in which attention runs under autocast.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Operations whose results selective checkpointing keeps: matrix products and attention, by their name.
KEPT = ("mm", "addmm", "bmm", "_linear_pointwise", "ragged_attention", "_varlen_attn")


def compile_model(model: nn.Module, precision: str, memory_budget: float | None = None) -> None:
    """Compiles whole layers if their attention is one operation in a graph, and feed-forward networks otherwise.

    `memory_budget` is the share of activations to keep for the backward pass; the compiler computes the rest again.
    """
    if memory_budget is not None:
        torch._functorch.config.activation_memory_budget = memory_budget
    for encoder in (module for module in model.modules() if isinstance(module, Encoder)):
        reason = why_not_whole_model(encoder, describe_gpu(next(encoder.parameters()).device), precision)
        if reason is None:
            encoder.is_compiled = True
            for layer in encoder.layers:
                # the forward pass alone, so that the hooks of FSDP stay outside the graph
                layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=True)
        else:
            logger.info(f"run.compile compiles feed-forward networks alone, because {reason}.")
            compile_feed_forward(encoder)


def why_not_whole_model(model: nn.Module, gpu: Gpu | None, precision: str) -> str | None:
    """Returns why the layers of a model cannot be graphs, or None if they can."""
    layers = [layer for module in model.modules() if isinstance(module, Encoder) for layer in module.layers]
    return next(filter(None, (why_not_whole(layer, gpu, DTYPES[precision]) for layer in layers)), None)


def why_not_whole(layer: Any, gpu: Gpu | None, dtype: torch.dtype) -> str | None:
    """Returns why a layer cannot be one graph, or None if it can."""
    attention: Attention = layer.attention
    if isinstance(layer.mlp, MixtureOfExperts):
        return "a graph of a mixture would compute all experts for all tokens"
    if attention.weigh is not None or attention.span_convolution is not None or attention.observe is not None:
        return "a layer computes more than attention from queries and keys (attention_fn, span_convolution, QK-Clip)"
    if not is_opaque(attention.pattern, attention.dropout):
        return "attention with dropout, biases, sinks or global tokens is more than one operation"
    call = AttentionCall(attention.pattern, dtype, attention.head_dim)
    if gpu is not None and choose_kernel(call, gpu) != "varlen":
        return "this GPU, precision or head size does not run torch's varlen_attn"
    return None


def compile_feed_forward(model: nn.Module) -> None:
    """Compiles the feed-forward network of each layer."""
    for layer in model.modules():
        mlp = getattr(layer, "mlp", None)
        for network in mlp.experts if isinstance(mlp, MixtureOfExperts) else [mlp]:
            if isinstance(network, nn.Module):
                network.compile(dynamic=True)


def checkpoint_layers(model: Any, kind: bool | str) -> None:
    """Recomputes layers in the backward pass, all of them or all but their matrix products and attention."""
    if kind == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _keep_products)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    elif kind:
        model.gradient_checkpointing_enable()


def _keep_products(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    name = getattr(operation, "__name__", "").split(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def make_deterministic() -> None:
    """Lets CUDA sum gradients in one order, so that a resumed run equals an uninterrupted one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS raises an error without it
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
