"""Floating point operations of a forward pass.

Only matrix products are counted: an [m, k] by [k, n] product is 2 m n k. A block that computes others, or fewer than
its linear layers suggest, has a method `flops(num_tokens)` that counts for the whole block. Norms, activations,
softmax, rotations and table lookups are left out. Attention counts the (query, key) pairs that the pattern allows, not
those that a backend computes in addition. A backward pass takes twice the FLOPs of the forward pass.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from bertblocks.analysis.parameters import part_of
from bertblocks.models import BertBlocksForSequenceClassification, BertBlocksModel, BertBlocksPreTrainedModel
from bertblocks.nn.attention import Attention
from bertblocks.nn.disentangled import DisentangledPosition

EMBEDDING, PROJECTIONS, SCORES = "embedding projection", "attention projections", "attention over keys"
FEED_FORWARD, HEAD = "feed-forward", "head"
EMBEDDING_PARTS = ("token embedding", "position and type embedding")


def count_flops(model: BertBlocksPreTrainedModel, length: int, scored: int | None = None) -> dict[str, int]:
    """Returns the FLOPs of one sequence of `length` tokens, by part and in total. A layer counts every time it runs.

    `scored` is the number of tokens that reach the head; the last layer computes no others after its attention. By
    default it is 1 for a classifier that reads the first token, and otherwise all, as in masked language modelling
    outside of training. The heads of `BertBlocksModel`, of sequence classification and of sentence order read one
    vector per sequence.
    """
    one_vector = isinstance(model, (BertBlocksModel, BertBlocksForSequenceClassification))
    if scored is None:
        scored = 1 if isinstance(model, BertBlocksForSequenceClassification) and model.chosen_tokens else length
    last = ["encoder", "layers", str(model.base_model.encoder.order[-1])]
    counts = dict.fromkeys((EMBEDDING, PROJECTIONS, SCORES, FEED_FORWARD, HEAD), 0)
    runs = Counter(model.base_model.encoder.order)
    counted: tuple[str, ...] = ()  # modules that counted for their submodules
    for name, module in model.named_modules():
        if name.startswith(counted):
            continue
        path = name.removeprefix("model.").split(".")
        times = runs[int(path[2])] if path[:2] == ["encoder", "layers"] and len(path) > 2 else 1
        is_block = hasattr(module, "flops")
        if path[-2:-1] == ["position"] and path[0] == "encoder":
            continue  # projections of distances, not of tokens: they count with their attention
        if is_block or isinstance(module, nn.Linear):
            part = part_of(name)
            num_tokens = times * length
            if part == HEAD:
                num_tokens = 1 if one_vector or path[0] in ("pooler", "order") else scored
            elif path[:3] == last and path[3:] not in (["attention", "qkv"], ["attention", "span_convolution"]):
                num_tokens -= length - scored
            names = {"attention": PROJECTIONS, **dict.fromkeys(EMBEDDING_PARTS, EMBEDDING)}
            if is_block:
                counted = (*counted, f"{name}.")
                flops = module.flops(num_tokens)
            else:
                flops = 2 * num_tokens * module.in_features * module.out_features
            label = names.get(part, part)
            counts[label] = counts.get(label, 0) + flops
        elif isinstance(module, Attention):
            pairs = visible_pairs(
                length, module.pattern.half_window, module.pattern.num_global_tokens, module.pattern.is_causal
            )
            # one product for the scores and one for the values
            products = 2
            if isinstance(module.position, DisentangledPosition):
                products += len(module.position.scores)
                counts[PROJECTIONS] += times * _distance_flops(module, module.position, length)
            counts[SCORES] += times * 2 * products * pairs * module.num_heads * module.head_dim
    return {**counts, "total": sum(counts.values())}


def _distance_flops(attention: Attention, position: DisentangledPosition, length: int) -> int:
    """Counts the projection of the vectors of all distances within reach to keys and queries."""
    reach, window = length - 1, attention.pattern.half_window
    if window is not None and not attention.pattern.num_global_tokens:
        reach = min(reach, window)
    num_vectors = position.embedding.rows(reach)[1]
    sizes = [layer.out_features for layer in (position.key, position.query) if layer is not None]
    return 2 * num_vectors * attention.qkv.in_features * sum(sizes or attention.sizes[:2])


def visible_pairs(length: int, half_window: int | None, num_global_tokens: int = 0, is_causal: bool = False) -> int:
    """Counts the (query, key) pairs of a sequence that attention allows.

    Example:
        >>> visible_pairs(10, None), visible_pairs(10, 1), visible_pairs(10, 1, num_global_tokens=1)
        (100, 28, 44)
    """
    if is_causal:  # half of the pairs, and the tokens themselves
        return (visible_pairs(length, half_window) + length) // 2
    if half_window is None:
        return length * length
    num_global = min(num_global_tokens, length)
    rest = length - num_global
    reach = min(half_window, max(rest - 1, 0))
    # at distance d on either side there are rest - d pairs
    near = rest + 2 * (reach * rest - reach * (reach + 1) // 2)
    return length * length - rest * rest + near
