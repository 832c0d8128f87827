"""The latency of one short query: batches of one text of 1 to 16 tokens, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from benchmarks.encoding import (
    DEPTHS,
    ONNX_INT8,
    OPENVINO_INT8,
    OURS,
    OURS_BF16,
    OURS_INT8,
    PADDED,
    Encoders,
    hidden_states,
)
from benchmarks.inputs import Batch, make_batch, real_texts
from benchmarks.peers import Graphs
from benchmarks.sentences import checkpoint_folder
from benchmarks.workload import Contender, Goal, Settings, Workload

LENGTHS = (1, 2, 4, 8, 16)
#: Texts that measure the activation ranges of static int8.
CALIBRATION = 64


class MiniLM(Encoders):
    """The published checkpoint with real texts; it is so small that calls cost as much as products."""

    @cached_property
    def theirs(self) -> PreTrainedModel:
        return AutoModel.from_pretrained(checkpoint_folder(), dtype=torch.float32).eval()

    @cached_property
    def texts(self) -> Batch:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
        _, texts = real_texts(self.settings.data, CALIBRATION)
        encoded = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    @cached_property
    def graphs(self) -> Graphs:
        return Graphs(self.theirs, self.name, self.settings.scratch, self.settings.threads, calibration=self.texts)

    def queries(self) -> list[Batch]:
        """The beginnings of the longest texts."""
        order = self.texts["attention_mask"].sum(1).argsort(descending=True).tolist()
        return [
            {name: x[[row], :length] for name, x in self.texts.items()}
            for row, length in zip(order, LENGTHS, strict=False)
        ]


class ShortTexts(Encoders):
    """A model whose static int8 has ranges measured on short texts: those of longer ones change its results."""

    @cached_property
    def graphs(self) -> Graphs:
        texts = make_batch([*LENGTHS] * (CALIBRATION // len(LENGTHS)), 30000)
        label = f"{self.name}-{self.layers}"
        return Graphs(self.theirs, label, self.settings.scratch, self.settings.threads, calibration=texts)


def in_turn(encode: Callable[[Batch], Tensor], batches: Sequence[Batch]) -> Callable[[], Tensor]:
    """A function that returns the mean vector of every query."""
    return lambda: torch.stack([encode(batch)[0].mean(0) for batch in batches])


def query(name: str, settings: Settings) -> Workload:
    models: Encoders
    if name == "minilm":
        models = MiniLM(name, 6, settings)  # a checkpoint that is cut computes nothing of use
        batches = models.queries()
    else:
        models = ShortTexts(name, settings.layers or DEPTHS[name], settings)
        batches = [make_batch([length], 30000) for length in LENGTHS]

    def on_model(kind: str) -> Callable[[], Callable[[], Tensor]]:
        def prepare() -> Callable[[], Tensor]:
            model = getattr(models, kind)
            return in_turn(lambda batch: hidden_states(model, batch), batches)

        return prepare

    lengths = ", ".join(map(str, LENGTHS))
    return Workload(
        f"one short query, {name}, {models.layers} layers (texts of {lengths} tokens in turn)",
        [
            Contender(PADDED, on_model("theirs")),
            Contender(ONNX_INT8, lambda: in_turn(models.graphs.onnxruntime_int8, batches), exact=False),
            Contender(OPENVINO_INT8, lambda: in_turn(models.graphs.openvino_int8, batches), exact=False),
            Contender(OURS, on_model("ours")),
            Contender(OURS_BF16, on_model("ours_bf16"), exact=False),
            Contender(OURS_INT8, on_model("ours_int8"), exact=False),
        ],
        compared=lambda vectors: vectors,
        goals=[Goal(OURS_INT8, PADDED, 3.0), Goal(OURS_INT8, ONNX_INT8, 1.0), Goal(OURS_INT8, OPENVINO_INT8, 1.0)],
        facts={"model": name, "layers": models.layers, "texts": len(LENGTHS), "tokens": sum(LENGTHS)},
    )
