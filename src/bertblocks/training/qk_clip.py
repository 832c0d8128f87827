"""QK-clip (Kimi Team, 2025): heads whose largest attention logit exceeds a limit get smaller queries and keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bertblocks.core.settings import RecipeError
from bertblocks.nn.attention import Attention
from bertblocks.nn.backends.base import AttentionContext, repeat_kv
from bertblocks.nn.ngpt import NGPTAttention
from bertblocks.training.distributed import shard_like, to_local

#: Queries per matrix product, which bounds memory for long sequences.
MAX_QUERIES = 512


class QKClip:
    """Observes the largest logit of every head in training, and rescales the heads above `limit` after a step.

    A head with the largest logit s > limit is rescaled by limit / s: its queries and its keys by the square root or, if
    several heads share the keys, its queries alone.
    """

    def __init__(self, model: nn.Module, limit: float) -> None:
        self.limit = limit
        self.attentions = [module for module in model.modules() if isinstance(module, Attention)]
        #: The largest logits since the last step, by the index of the attention.
        self.highest: dict[int, Tensor] = {}
        for index, attention in enumerate(self.attentions):
            if attention.query_norm is not None or isinstance(attention, NGPTAttention):
                raise RecipeError(
                    f"optimizer.qk_clip is {limit:g}, but the model normalizes queries and keys (qk_norm or ngpt), "
                    "which already limits their products; remove qk_clip."
                )
            attention.observe = lambda q, k, context, index=index: self._observe(index, q, k, context)

    def _observe(self, index: int, q: Tensor, k: Tensor, context: AttentionContext) -> None:
        found = max_logits(q, k, context)
        self.highest[index] = torch.maximum(self.highest.get(index, found), found)

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        """Rescales what exceeds the limit since the last call, on all processes alike."""
        if not self.highest:
            return
        sizes = [len(found) for found in self.highest.values()]
        together = torch.cat(list(self.highest.values()))
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(together, dist.ReduceOp.MAX)
        for index, found in zip(self.highest, together.split(sizes), strict=True):
            _rescale(self.attentions[index], (self.limit / found).clamp(max=1.0).where(found > 0, 1.0))
        self.highest.clear()


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, context: AttentionContext) -> Tensor:
    """The largest scaled product of a query and a key that it sees, for each head."""
    pattern, layout = context.pattern, context.layout
    k = repeat_kv(k, q.shape[1])
    highest = torch.full((q.shape[1],), float("-inf"), device=q.device)
    for tokens in layout.slices():
        queries, keys = (x[tokens].transpose(0, 1) for x in (q, k))  # [heads, length, head_dim]
        index = torch.arange(queries.shape[1], device=q.device)
        real = None if layout.key_mask is None else layout.key_mask.flatten()[tokens]
        for start in range(0, len(index), MAX_QUERIES):
            part, near = index[start : start + MAX_QUERIES], index
            if pattern.half_window is not None and not pattern.num_global_tokens:
                near = index[max(start - pattern.half_window, 0) : start + len(part) + pattern.half_window]
            visible = pattern.visible(part[:, None], near)
            if real is not None:
                visible = visible & real[part, None] & real[near]
            scores = (queries[:, part] @ keys[:, near].transpose(1, 2)).float()
            highest = torch.maximum(highest, scores.masked_fill(~visible, float("-inf")).amax(dim=(1, 2)))
    return highest * context.scale


def _rescale(attention: Attention, factors: Tensor) -> None:
    """Multiplies the products of each head's queries and keys by its factor."""
    shares_keys = attention.num_kv_heads < attention.num_heads
    of_queries = (factors if shares_keys else factors.sqrt()).repeat_interleave(attention.head_dim)
    of_keys = torch.ones(attention.sizes[1], device=factors.device) if shares_keys else of_queries
    rows = torch.cat([of_queries, of_keys, torch.ones(attention.sizes[2], device=factors.device)])
    for parameter, scale in (
        (attention.qkv.weight, rows[:, None]),
        (attention.qkv.bias, rows),
        (attention.query_bias, of_queries),
    ):
        if parameter is not None:
            to_local(parameter).mul_(to_local(shard_like(scale.to(parameter.dtype), parameter)))
