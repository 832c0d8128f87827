"""Settings of fine-tuning: which keys each task has, what they may hold, and their defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from bertblocks.core.settings import Count, Positive, Section, Share


class FineTuneSettings(Section):
    """What all tasks share."""

    epochs: Positive | None = None
    """Times that every example is seen. None: 3 to 10, fewer the more examples there are."""
    batch_size: Count = 32
    """Examples of a step, whatever the number of processes."""
    learning_rate: Positive | None = None
    """The highest one. None: by the size of the model, from 2.5e-4 for the smallest to 3e-5 for the largest."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup: Share = 0.1
    """The share of steps in which the learning rate rises."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How it falls after that."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The learning rate of a layer, relative to the one above it."""
    freeze_layers: Annotated[int, Field(ge=0)] = 0
    """So many of the lowest layers, and the embeddings below them, are not trained."""
    lora_rank: Count | None = None
    """Trains low-rank additions to the matrices inside layers (LoRA) in place of all weights; needs peft."""
    clip: Positive | None = 1.0
    """The largest norm of all gradients together."""
    max_length: Count | None = None
    """Tokens of a sequence, special ones included. None: what the model reads, but no more than the task needs."""
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The share of examples that is kept for evaluation when no file is given for it."""
    evaluations_per_epoch: Count = 1
    """How often the model is evaluated; the best one is kept."""
    patience: Count | None = None
    """Training stops after so many evaluations without a better one."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    seeds: Count = 1
    """So many runs, with this seed and the ones after it; their scores are given with mean and interval."""
    header: bool | None = None
    """Whether the first row of a csv or tsv file names the columns. None: look."""
    micro_batch_size: Count | None = None
    """Examples that a process takes at once; gradients of several such parts are added up."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    gradient_checkpointing: bool = False
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The decay per step of a running mean of the weights, which is then evaluated and written."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []

    @classmethod
    def takes_text(cls, key: str) -> bool:
        """Whether a key holds any text, such as the name of a column."""
        return key in cls.model_fields and cls.model_fields[key].annotation == (str | None)


class ClassifySettings(FineTuneSettings):
    text: str | None = None
    """The column of the text; found by name or content if not given. So are the next two; `text_pair=` is none."""
    text_pair: str | None = None
    label: str | None = None
    problem: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """None: lists are several labels, numbers with a point are scores, all else is one label."""
    separator: str | None = None
    """Between the labels of one cell, where a text may have several."""
    class_weights: Literal["balanced"] | None = None
    """Makes rare labels count as much as common ones."""


class TagSettings(FineTuneSettings):
    words: str | None = None
    """The column of the words, in files of records; found by name if not given. So are the next three."""
    tags: str | None = None
    text: str | None = None
    spans: str | None = None
    column: str | None = None
    """The column of the tags in CoNLL files: a name for CoNLL-U (upos if not given), a number for others."""
    scheme: Literal["bio", "iob1", "bioes", "plain"] | None = None
    """How tags mark entities. None: look."""
    every_piece: bool = False
    """All pieces of a word are labelled, not its first alone."""


class AnswerSettings(FineTuneSettings):
    question: str | None = None
    """The column of the question, in files of records; found by name if not given. So are the next three."""
    context: str | None = None
    answers: str | None = None
    id: str | None = None
    stride: Count = 128
    """Tokens from the start of one window of a long passage to the start of the next, in training."""
    max_answer_tokens: Count = 30
    no_answer_threshold: float = 0.0
    """There is no answer where the score of none is above that of the best one by more than this."""


class EmbedSettings(FineTuneSettings):
    text: str | None = None
    """The column of the first text; found by name or content if not given. So are the next three."""
    text_pair: str | None = None
    negative: str | None = None
    label: str | None = None
    """The column of scores. Without one, rows are pairs or triplets that belong together."""
    pooling: Literal["mean", "cls", "max"] | None = None
    """None: as the checkpoint says, else mean."""
    loss: Literal["contrast", "cosent", "cosine"] | None = None
    """None: contrast within the batch for pairs and triplets, CoSENT for scored pairs."""
    dimensions: list[Count] = []
    """Prefixes of the embedding that are trained along with the whole (Matryoshka)."""

    @field_validator("micro_batch_size")
    @classmethod
    def _refuse_parts(cls, value: int | None) -> None:
        if value is not None:
            raise ValueError(
                f"is {value}; embed compares all texts of a batch with each other, so it cannot be taken in parts. "
                "gradient_checkpointing=true saves memory"
            )


#: By task.
SETTINGS: dict[str, type[FineTuneSettings]] = {
    "classify": ClassifySettings,
    "tag": TagSettings,
    "answer": AnswerSettings,
    "embed": EmbedSettings,
}
