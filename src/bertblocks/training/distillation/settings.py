"""Settings of distillation: the keys of each method, their values and defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bertblocks.core.settings import Count, Positive, Section, Share
from bertblocks.text.records import ReadOptions


class DistillSettings(Section):
    """The settings that all methods share."""

    epochs: Positive = 3
    """Passes over the texts."""
    batch_size: Count = 32
    """Texts per step, over all processes."""
    learning_rate: Positive = 2e-4
    """The peak learning rate. It rises over `warmup` and then falls linearly to 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup: Share = 0.1
    """The share of steps over which the learning rate rises."""
    clip: Positive | None = 1.0
    """The largest gradient norm; larger gradients are scaled down."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The student's dropout in training. The teacher's outputs are exact, so none is the default."""
    max_length: Count | None = None
    """Tokens per text, including special tokens. None: 256, or what the models read if that is less."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The share of texts held out for evaluation, at most 1,000. They choose the best checkpoint."""
    evaluations: Count = 10
    """How often the student is evaluated on held-out texts."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    header: bool | None = None
    """Whether the first row of a csv or tsv file names the columns. None: detect."""
    delimiter: str | None = None
    """The delimiter of a csv or tsv file. None: detect."""
    quote: str | None = None
    """The quote character of a csv or tsv file, or none. None: detect."""
    encoding: str | None = None
    """The encoding of a csv or tsv file. None: detect."""
    micro_batch_size: Count | None = None
    """Texts per process and forward pass; gradients accumulate over the step's batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    gradient_checkpointing: bool = False
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []
    keep_checkpoints: bool = False
    """Keeps all training checkpoints, also when the run has finished."""

    @property
    def read_options(self) -> ReadOptions:
        """How to read a file of texts."""
        return ReadOptions(delimiter=self.delimiter, quote=self.quote, encoding=self.encoding, header=self.header)

    @classmethod
    def takes_text(cls, key: str) -> bool:
        """Returns whether a key takes any text, such as the name of a column."""
        return key in cls.model_fields and cls.model_fields[key].annotation == (str | None)


class TextSettings(DistillSettings):
    """The settings of methods that read texts."""

    text: str | None = None
    """The column of the text, in tables. Columns are found by name or content if not given."""
    text_pair: str | None = None
    """A second column of texts."""


class EmbeddingDistillSettings(TextSettings):
    pooling: Literal["mean", "cls", "max", "last", "weighted_mean", "mean_sqrt_len"] | None = None
    """None: the student's own pooling, or the teacher's if the student is not an embedding model."""
    prompt_names: list[str] = []
    """Prompts of the teacher, such as query and document. Each text is learned once with each of them. Empty: with the
    teacher's default prompt."""


class RelationSettings(TextSettings):
    learning_rate: Positive = 4e-4
    """The peak learning rate. It rises over `warmup` and then falls linearly to 0."""
    teacher_layer: Count | None = None
    """The layer of the teacher, counted from 1, that the student's last layer learns. None: the last one, or of more
    than 12 layers the one at 7/8 of the depth."""
    relation_heads: Count | None = None
    """The parts into which queries, keys and values are split. None: the most, up to 48, that divide both models' sizes
    and leave at least 8 numbers per part."""


class HiddenSettings(TextSettings):
    temperature: Positive = 2.0
    """Divides the logits of both models before they are compared."""
    logit_weight: Annotated[float, Field(ge=0)] = 1.0
    """The weight of the loss of the logits, next to that of the hidden states."""
    mask_rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The share of tokens that are masked, for masked language models."""


class ScoreSettings(DistillSettings):
    batch_size: Count = 8
    """Queries per step, over all processes."""
    learning_rate: Positive = 1e-4
    """The peak learning rate. It rises over `warmup` and then falls linearly to 0."""
    loss: Literal["mse", "margin-mse"] | None = None
    """mse: the scores themselves. margin-mse: the margins between a query's first document and its others. None:
    margin-mse if every query has at least two documents, else mse."""
    max_documents: Annotated[int, Field(ge=2)] = 16
    """The most documents of a query in a step: the first one, and others at random."""
    query: str | None = None
    """The column of the query. This column and the next two are found by name or content if not given."""
    document: str | None = None
    negative: str | None = None


#: By method.
SETTINGS: dict[str, type[DistillSettings]] = {
    "embeddings": EmbeddingDistillSettings,
    "relations": RelationSettings,
    "hidden": HiddenSettings,
    "scores": ScoreSettings,
}
