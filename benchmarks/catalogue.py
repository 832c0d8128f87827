"""Every workload by name, grouped as in the report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.encoding import LENGTHS, any_uniform, deberta, long_text, ragged, stack, uniform
from benchmarks.jax_twin import jax_ragged
from benchmarks.masked_lm import masked_lm
from benchmarks.query import query
from benchmarks.rerank import rerank
from benchmarks.sentences import sentences
from benchmarks.workload import Settings, Workload

Builder = Callable[[Settings], Workload]

#: One entry for each row in the table of goals, and real texts through a published checkpoint.
ROWS: dict[str, Builder] = {
    "bert-ragged": partial(ragged, "bert-base"),
    "bert-8x128": partial(uniform, "bert-base", 8, 128),
    "bert-8x512": partial(uniform, "bert-base", 8, 512),
    "modernbert-ragged": partial(ragged, "modernbert-base"),
    "modernbert-8x128": partial(uniform, "modernbert-base", 8, 128),
    "modernbert-8x512": partial(uniform, "modernbert-base", 8, 512),
    "modernbert-2048": partial(long_text, 2048, 1.6, None),
    "modernbert-8192": partial(long_text, 8192, 3.0, 6.0),
    "deberta-v3-ragged": partial(deberta, None),
    "deberta-v3-8x128": partial(deberta, 8),
    "masked-lm-bert-ragged": partial(masked_lm, "bert", False),
    "masked-lm-bert-full": partial(masked_lm, "bert", True),
    "masked-lm-modernbert-ragged": partial(masked_lm, "modernbert", False),
    "masked-lm-modernbert-full": partial(masked_lm, "modernbert", True),
    "query-minilm": partial(query, "minilm"),
    "query-bert": partial(query, "bert-base"),
    "jax-ragged": jax_ragged,
    "sentences": sentences,
    "rerank": rerank,
}
#: How cost grows with length.
STACKS: dict[str, Builder] = {
    f"{kind}-{length}": partial(stack, kind, length) for kind in ("local", "global", "mixed") for length in LENGTHS
}
#: No uniform shape may be slower than transformers.
SHAPES: dict[str, Builder] = {
    f"sweep-{name}-{rows}x{length}": partial(any_uniform, f"{name}-base", rows, length)
    for name in ("bert", "modernbert")
    for rows in (1, 2, 4, 8)
    for length in (8, 32, 128, 512)
}
