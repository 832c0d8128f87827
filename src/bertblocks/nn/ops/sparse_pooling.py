"""Pooling of a decoder's logits into one sparse vector per sequence (SPLADE), in tiles of tokens x vocabulary.

Only one tile of logits exists at a time, so memory does not grow with tokens x vocabulary, forward or backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.linear import linear, not_cast

POOLINGS = ("max", "sum")
#: How many times log(1 + x) follows relu; by sentence-transformers' names.
ACTIVATIONS = {"relu": 1, "log1p_relu": 2}
#: The most tokens and the most logits of a tile.
MAX_TOKENS, MAX_LOGITS = 256, 2**20


def sparse_pooling(
    hidden: Tensor,  # [tokens, hidden]
    weight: Tensor,  # [vocabulary, hidden]
    bias: Tensor | None,
    lengths: Sequence[int],
    pooling: str = "max",
    activation: str = "relu",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `[sequences, vocabulary]`: the max or sum of log(1 + relu(logits)) over the tokens of each sequence.

    The activation "log1p_relu" takes the logarithm twice: log(1 + log(1 + relu(logits))). An empty sequence is 0.
    Products run in `dtype`, the weight's own by default; the result is in fp32 for half precision.

    Example:
        >>> hidden, weight = torch.randn(5, 8), torch.randn(100, 8)
        >>> expected = (hidden[:3] @ weight.T).relu().log1p().amax(0)
        >>> torch.allclose(sparse_pooling(hidden, weight, None, [3, 2])[0], expected)
        True
    """
    with not_cast(hidden):
        if torch.is_grad_enabled():
            return SparsePooling.apply(hidden, weight, bias, lengths, pooling, activation, dtype or weight.dtype)
        return _pool_weights(hidden, weight, bias, lengths, pooling, activation, dtype or weight.dtype)


def pool_logits(
    hidden: Tensor,
    decode: Callable[[Tensor], Tensor],
    vocabulary: int,
    lengths: Sequence[int],
    pooling: str = "max",
    activation: str = "relu",
) -> Tensor:
    """Return what `sparse_pooling` does without gradients, for a decoder that computes all logits of a token."""
    out = upcast(hidden).new_zeros(len(lengths), vocabulary)
    for part in _parts(lengths, max(1, MAX_LOGITS // vocabulary)):
        _add(out, decode(hidden[_tokens(part)]), part, pooling, activation)
    return _activate(out, activation) if pooling == "max" else out


class Run(NamedTuple):
    """Consecutive sequences of equal length, or a part of one sequence."""

    sequences: slice
    tokens: slice

    @property
    def shape(self) -> tuple[int, int]:
        count = self.sequences.stop - self.sequences.start
        return count, (self.tokens.stop - self.tokens.start) // count


def _runs(lengths: Sequence[int], max_tokens: int) -> Iterator[Run]:
    """Yield runs of at most `max_tokens` tokens, in order; empty sequences are left out."""
    sequence = token = 0
    for length, run in itertools.groupby(lengths):
        end = sequence + len(list(run))
        step = max(1, max_tokens // max(length, 1))
        for first in range(sequence, end, step):
            last = min(first + step, end)
            stop = token + (last - first) * length
            for start in range(token, stop, max_tokens):  # more than one part only of a sequence that is too long
                yield Run(slice(first, last), slice(start, min(start + max_tokens, stop)))
            token = stop
        sequence = end


def _parts(lengths: Sequence[int], max_tokens: int) -> Iterator[list[Run]]:
    """Yield consecutive runs that have at most `max_tokens` tokens together."""
    part: list[Run] = []
    for run in _runs(lengths, max_tokens):
        if part and run.tokens.stop - part[0].tokens.start > max_tokens:
            yield part
            part = []
        part.append(run)
    if part:
        yield part


def _tokens(part: Sequence[Run]) -> slice:
    return slice(part[0].tokens.start, part[-1].tokens.stop)


def _tiles(lengths: Sequence[int], vocabulary: int) -> Iterator[tuple[list[Run], slice]]:
    for part in _parts(lengths, MAX_TOKENS):
        tokens = _tokens(part)
        size = MAX_LOGITS // (tokens.stop - tokens.start)
        for start in range(0, vocabulary, size):
            yield part, slice(start, min(start + size, vocabulary))


def _by_run(logits: Tensor, part: Sequence[Run]) -> Iterator[tuple[Run, Tensor]]:
    """Yield the logits of each run, `[sequences, length, tile]`."""
    sizes = [run.tokens.stop - run.tokens.start for run in part]
    for run, own in zip(part, logits.split(sizes), strict=True):
        yield run, own.view(*run.shape, -1)


def _activate(x: Tensor, activation: str) -> Tensor:
    """Apply the activation in place."""
    x.relu_()
    for _ in range(ACTIVATIONS[activation]):
        x.log1p_()
    return x


def _slope(logits: Tensor, activation: str) -> Tensor:
    """Return the derivative of the activation; 0 where the logit is not positive."""
    x = logits.relu()
    slope = 1 / (1 + x)
    if ACTIVATIONS[activation] == 2:
        slope /= 1 + x.log1p()
    return slope.masked_fill_(logits <= 0, 0.0)


def _add(out: Tensor, logits: Tensor, part: Sequence[Run], pooling: str, activation: str) -> None:
    """Pool logits into the rows of their sequences; maxima are activated at the end, because the activation rises."""
    if pooling == "sum":
        logits = _activate(upcast(logits), activation)
    for run, own in _by_run(logits, part):
        rows = out[run.sequences]
        if pooling == "sum":
            rows += own.sum(1)
        else:
            torch.maximum(rows, own.amax(1).to(out.dtype), out=rows)


def _pool_weights(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Sequence[int],
    pooling: str,
    activation: str,
    dtype: torch.dtype,
) -> Tensor:
    hidden, weight, bias = _cast(hidden, weight, bias, dtype)
    out = upcast(hidden).new_zeros(len(lengths), len(weight))
    for part, tile in _tiles(lengths, len(weight)):
        logits = linear(hidden[_tokens(part)], weight[tile], None if bias is None else bias[tile])
        _add(out[:, tile], logits, part, pooling, activation)
    return _activate(out, activation) if pooling == "max" else out


def _cast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class SparsePooling(torch.autograd.Function):
    """`sparse_pooling` with gradients: a maximum remembers its token, a sum computes its tiles again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, lengths: Any, pooling: Any, activation: Any, dtype: Any
    ) -> Any:  # type: ignore[override]
        ctx.options = lengths, pooling, activation, dtype
        if pooling == "sum":
            ctx.save_for_backward(hidden, weight, bias)
            return _pool_weights(hidden, weight, bias, lengths, pooling, activation, dtype)
        own, rows, offsets = _cast(hidden, weight, bias, dtype)
        best = upcast(own).new_zeros(len(lengths), len(weight))
        tokens = torch.zeros(best.shape, dtype=torch.int32, device=hidden.device)
        for part, tile in _tiles(lengths, len(weight)):
            logits = linear(own[_tokens(part)], rows[tile], None if offsets is None else offsets[tile])
            _find_best(best[:, tile], tokens[:, tile], logits, part)
        ctx.save_for_backward(hidden, weight, bias, best, tokens)
        return _activate(best.clone(), activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Any) -> Any:  # type: ignore[override]
        lengths, pooling, activation, dtype = ctx.options
        if pooling == "sum":
            hidden, weight, bias = ctx.saved_tensors
            gradients = _sum_gradients(hidden, weight, bias, above, lengths, activation, dtype)
        else:
            hidden, weight, bias, best, tokens = ctx.saved_tensors
            gradient = above * _slope(best, activation)
            if hidden.device.type == "cpu":
                gradients = _max_gradients(hidden, weight, bias, gradient, tokens)
            else:  # a GPU would wait for the number of entries
                gradients = _tiled_max_gradients(hidden, weight, bias, gradient, tokens, lengths, dtype)
        return (*gradients, None, None, None, None)


def _find_best(best: Tensor, tokens: Tensor, logits: Tensor, part: Sequence[Run]) -> None:
    """Update the largest logit of each sequence and entry, and its token, where a part has a larger one."""
    for run, own in _by_run(logits, part):
        rows, owners = best[run.sequences], tokens[run.sequences]
        values, index = own.max(dim=1)
        starts = torch.arange(run.tokens.start, run.tokens.stop, own.shape[1], device=own.device)
        values = values.to(best.dtype)
        owners.copy_(torch.where(values > rows, (index + starts[:, None]).to(owners.dtype), owners))
        torch.maximum(rows, values, out=rows)


def _max_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient: Tensor,  # [sequences, vocabulary], of the largest logits
    tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gather the entries that have a gradient: each connects one token with one row of the weight."""
    entries, sequences = gradient.t().nonzero(as_tuple=True)  # ordered by entry
    values, tokens = gradient[sequences, entries], tokens[sequences, entries].long()
    for_weight = _weighted_rows(upcast(hidden), tokens, values, entries, len(weight))
    order = tokens.argsort()
    for_hidden = _weighted_rows(upcast(weight), entries[order], values[order], tokens[order], len(hidden))
    return (
        for_hidden.to(hidden.dtype),
        for_weight.to(weight.dtype),
        None if bias is None else gradient.sum(0).to(bias.dtype),
    )


def _tiled_max_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient: Tensor,  # [sequences, vocabulary], of the largest logits
    tokens: Tensor,
    lengths: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write the entries into tiles of tokens x vocabulary, and multiply these."""
    own, rows = hidden.to(dtype), weight.to(dtype)
    for_hidden, for_weight = torch.zeros_like(upcast(hidden)), torch.zeros_like(upcast(weight))
    for part, tile in _tiles(lengths, len(weight)):
        token_range, sequences = _tokens(part), slice(part[0].sequences.start, part[-1].sequences.stop)
        count = token_range.stop - token_range.start
        index = tokens[sequences, tile].long() - token_range.start
        is_inside = (index >= 0) & (index < count)  # a long sequence has other parts
        values = gradient[sequences, tile].masked_fill(~is_inside, 0.0)
        logits_gradient = values.new_zeros(count, values.shape[1]).scatter_add_(0, index.clamp(0, count - 1), values)
        logits_gradient = logits_gradient.to(dtype)
        for_hidden[token_range] += linear(logits_gradient, rows[tile].t(), None)
        for_weight[tile] += logits_gradient.t() @ own[token_range]
    return (
        for_hidden.to(hidden.dtype),
        for_weight.to(weight.dtype),
        None if bias is None else gradient.sum(0).to(bias.dtype),
    )


def _weighted_rows(table: Tensor, index: Tensor, weights: Tensor, owners: Tensor, count: int) -> Tensor:
    """Sum the rows of a table at `index`, times weights, for each of `count` owners, which must be in order."""
    ends = torch.searchsorted(owners, torch.arange(count, device=owners.device))
    return F.embedding_bag(index, table, ends, mode="sum", per_sample_weights=weights.to(table.dtype))


def _sum_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    above: Tensor,
    lengths: Sequence[int],
    activation: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    own, rows, offsets = _cast(hidden, weight, bias, dtype)
    for_hidden, for_weight = torch.zeros_like(upcast(hidden)), torch.zeros_like(upcast(weight))
    for_bias = None if bias is None else torch.zeros_like(upcast(bias))
    for part, tile in _tiles(lengths, len(weight)):
        tokens = _tokens(part)
        logits = linear(own[tokens], rows[tile], None if offsets is None else offsets[tile])
        gradient = _slope(upcast(logits), activation)
        for run, slopes in _by_run(gradient, part):
            slopes *= above[run.sequences, None, tile]
        if for_bias is not None:
            for_bias[tile] += gradient.sum(0)
        gradient = gradient.to(dtype)
        for_hidden[tokens] += linear(gradient, rows[tile].t(), None)
        for_weight[tile] += gradient.t() @ own[tokens]
    return (
        for_hidden.to(hidden.dtype),
        for_weight.to(weight.dtype),
        None if for_bias is None or bias is None else for_bias.to(bias.dtype),
    )
