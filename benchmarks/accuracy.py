"""The accuracy of every runtime's int8, and of bf16, compared with fp32, on a published checkpoint and real texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import bertblocks
from benchmarks.encoding import ONNX_INT8, OPENVINO_INT8, OURS_BF16, OURS_INT8, PADDED, hidden_states
from benchmarks.inputs import Batch, real_texts, sts_pairs
from benchmarks.peers import Graphs, need, need_bf16
from benchmarks.sentences import checkpoint_folder
from benchmarks.workload import Settings, Unavailable

#: Texts whose tokens are compared, and texts per batch.
COUNT, BATCH = 512, 64
#: Goals for int8: mean and lowest token cosine, and how much STS-B may fall.
GOAL = {"cosine_mean": 0.998, "cosine_min": 0.99, "sts_change": 0.002}

Encode = Callable[[Batch], Tensor]


def int8_accuracy(settings: Settings) -> dict[str, Any]:
    """Cosines between int8 or bf16 and fp32 tokens, and the Spearman correlation of both on STS-B."""
    try:
        folder = checkpoint_folder()
    except Unavailable as reason:
        return {"missing": str(reason)}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    source, texts = real_texts(settings.data, COUNT)
    batches = [tokenize(tokenizer, texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
    pairs = sts_pairs(settings.data)
    reference = [hidden_states(theirs, batch)[batch["attention_mask"].bool()] for batch in batches]
    graphs = Graphs(theirs, "minilm", settings.scratch, settings.threads, calibration=batches[0])
    forms: dict[str, Callable[[], Encode]] = {
        PADDED: lambda: lambda batch: hidden_states(theirs, batch),
        ONNX_INT8: lambda: graphs.onnxruntime_int8,
        OPENVINO_INT8: lambda: graphs.openvino_int8,
        OURS_BF16: lambda: our_bf16(folder),
        OURS_INT8: lambda: our_int8(folder),
    }
    results: dict[str, Any] = {}
    for name, prepare in forms.items():
        try:
            encode = prepare()
        except Unavailable as reason:
            results[name] = {"missing": str(reason)}
            continue
        hidden = [encode(batch)[batch["attention_mask"].bool()] for batch in batches]
        cosines = F.cosine_similarity(torch.cat(hidden), torch.cat(reference), dim=-1)
        results[name] = {"cosine_mean": cosines.mean().item(), "cosine_min": cosines.min().item()}
        if pairs is not None:
            results[name]["sts"] = sts_correlation(encode, tokenizer, pairs)
    return {"texts": source, "tokens": sum(len(text) for text in reference), "goal": GOAL, "contenders": results}


def our_bf16(folder: str) -> Encode:
    need_bf16()
    model = bertblocks.from_huggingface(folder).eval().to(torch.bfloat16)
    return lambda batch: hidden_states(model, batch)


def our_int8(folder: str) -> Encode:
    model = bertblocks.from_huggingface(folder).eval()
    model.quantize("int8")
    return lambda batch: hidden_states(model, batch)


def tokenize(tokenizer: Any, texts: list[str]) -> Batch:
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def sts_correlation(encode: Encode, tokenizer: Any, pairs: Sequence[tuple[str, str, float]]) -> float:
    """The Spearman correlation between cosines of mean-pooled embeddings and human scores."""
    need("scipy")
    from scipy.stats import spearmanr

    sentences = [sentence for first, second, _ in pairs for sentence in (first, second)]
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))  # little padding
    pooled = []
    for start in range(0, len(order), BATCH):
        batch = tokenize(tokenizer, [sentences[index] for index in order[start : start + BATCH]])
        weights = batch["attention_mask"][..., None].float()
        pooled.append((encode(batch) * weights).sum(1) / weights.sum(1))
    vectors = torch.cat(pooled)[torch.tensor(order).argsort()]
    cosines = F.cosine_similarity(vectors[0::2], vectors[1::2], dim=-1)
    return float(spearmanr(cosines.numpy(), [score for *_, score in pairs]).statistic)
