"""Settings of fine-tuning: the keys of each task, their values and defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from bertblocks.core.settings import Count, Positive, Section, Share
from bertblocks.text.records import ReadOptions


class FineTuneSettings(Section):
    """The settings that all tasks share."""

    epochs: Positive | None = None
    """Passes over the examples. None: by task, model and number of examples, more the fewer there are."""
    batch_size: Count | None = None
    """Examples per step, over all processes. None: 32, or 16 for few examples."""
    learning_rate: Positive | None = None
    """The peak learning rate. None: by task, model and number of examples."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup: Share = 0.1
    """The share of steps over which the learning rate rises."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls after the warmup."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The learning rate of a layer relative to the layer above it."""
    freeze_layers: Annotated[int, Field(ge=0)] = 0
    """How many of the lowest layers to freeze, together with the embeddings."""
    lora_rank: Count | None = None
    """Trains LoRA adapters of this rank instead of all weights; needs peft."""
    clip: Positive | None = 1.0
    """The largest gradient norm; larger gradients are scaled down."""
    max_length: Count | None = None
    """Tokens per sequence, including special tokens. None: the model's limit, or the task's default if that is less."""
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The share of examples held out for evaluation if there is no evaluation file."""
    evaluations_per_epoch: Count | None = None
    """How often the model is evaluated; the best one is kept, or the start. None: once, but at most 10 times in all."""
    patience: Count | None = 5
    """Stops training after this many evaluations without improvement (early stopping); null: never."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    seeds: Count = 1
    """The number of runs, with `seed` and the seeds after it; scores are reported as mean and interval."""
    header: bool | None = None
    """Whether the first row of a csv or tsv file names the columns. None: detect."""
    delimiter: str | None = None
    """The delimiter of a csv or tsv file. None: detect."""
    quote: str | None = None
    """The quote character of a csv or tsv file, or none. None: detect."""
    encoding: str | None = None
    """The encoding of a csv or tsv file. None: detect."""
    micro_batch_size: Count | None = None
    """Examples per process and forward pass. Gradients accumulate over the step's batch; where examples are compared
    with each other, they are cached (GradCache), at the price of a second forward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    gradient_checkpointing: bool = False
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The decay per step of an exponential moving average of the weights, which is then evaluated and saved."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []
    keep_checkpoints: bool = False
    """Keeps all training checkpoints, also when the run has finished."""

    @property
    def read_options(self) -> ReadOptions:
        """How to read a file of examples."""
        return ReadOptions(delimiter=self.delimiter, quote=self.quote, encoding=self.encoding, header=self.header)

    @classmethod
    def takes_text(cls, key: str) -> bool:
        """Returns whether a key takes any text, such as the name of a column."""
        return key in cls.model_fields and cls.model_fields[key].annotation == (str | None)


class ClassifySettings(FineTuneSettings):
    text: str | None = None
    """The column of the text. Columns are found by name or content if not given; `text_pair=` means no second text."""
    text_pair: str | None = None
    label: str | None = None
    problem: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """None: lists hold several labels, numbers with a fraction are scores, everything else is one label."""
    separator: str | None = None
    """Separates the labels of one cell, if a text may have several."""
    positive: str | None = None
    """With two labels, the one whose F1 is reported. None: the second, unless it negates the first (`not_x`, `no`)."""
    class_weights: Literal["balanced"] | None = None
    """Makes rare labels count as much as common ones."""
    method: Literal["auto", "full", "few-shot"] = "auto"
    """full: trains on the labels. few-shot: brings texts of a label together, then fits the head. auto: by the data."""
    head: Literal["probe", "random"] = "probe"
    """How a new head starts: fitted to the untrained encoder (logistic regression), or random."""


class TagSettings(FineTuneSettings):
    words: str | None = None
    """The column of the words, in tables. This column and the next three are found by name if not given."""
    tags: str | None = None
    text: str | None = None
    spans: str | None = None
    column: str | None = None
    """The column of the tags in CoNLL files: a name for CoNLL-U (upos by default), a number for others."""
    scheme: Literal["bio", "iob1", "bioes", "plain"] | None = None
    """How tags mark entities. None: detect."""
    every_piece: bool = False
    """Labels all tokens of a word instead of only its first."""


class AnswerSettings(FineTuneSettings):
    question: str | None = None
    """The column of the question, in tables. This column and the next three are found by name if not given."""
    context: str | None = None
    answers: str | None = None
    id: str | None = None
    stride: Count = 128
    """Tokens between the starts of two windows of a long passage, in training."""
    max_answer_tokens: Count = 30
    no_answer_threshold: float = 0.0
    """The answer is empty if the score of no answer exceeds the best answer's by more than this."""


class MixtureSettings(FineTuneSettings):
    """The settings of tasks that can train on several data sets in one run."""

    dataset_temperature: Positive = 1.0
    """With several data sets, each batch comes from one of them, of n examples, with a probability proportional to
    n^(1/T), where T is this temperature: 1 follows the sizes, and larger values come closer to equal shares."""


class EmbedSettings(MixtureSettings):
    text: str | None = None
    """The column of the first text. This column and the next three are found by name or content if not given."""
    text_pair: str | None = None
    negative: str | None = None
    label: str | None = None
    """The column of scores. Without it, rows are related pairs or triplets."""
    pooling: Literal["mean", "cls", "max", "last", "weighted_mean", "mean_sqrt_len"] | None = None
    """None: the checkpoint's pooling, or mean."""
    loss: Literal["contrast", "cosent", "cosine", "simcse"] | None = None
    """None: in-batch contrast for pairs and triplets, CoSENT for scored pairs. simcse contrasts single texts with
    themselves under another dropout (Gao et al., 2021)."""
    temperature: Positive = 0.05
    """Divides the cosines of contrast and simcse."""
    dropout: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Replaces all dropout rates of the model in training. None: those of its config."""
    dimensions: list[Count] = []
    """Prefixes of the embedding to train along with the whole (Matryoshka)."""
    negative_weight: Positive = 1.0
    """Multiplies the terms of an example's own negatives in the softmax of contrast."""
    false_negative_margin: float | None = None
    """Contrast leaves out negatives whose cosine exceeds that of the positive minus this margin; -0.1 leaves out those
    that exceed it by more than 0.1. None: none are left out."""
    margin_kind: Literal["absolute", "relative"] = "absolute"
    """Whether the margin is a difference of cosines or a share of the positive's cosine."""
    mlm_every: Annotated[int, Field(ge=2)] | None = None
    """Every step with this number is one of masked language modeling on the texts of its batch; the head that predicts
    tokens is not saved."""
    mlm_rate: Annotated[float, Field(gt=0, le=1)] = 0.3
    """The share of tokens that these steps hide."""

    @field_validator("mlm_every")
    @classmethod
    def _refuse_adapters(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("lora_rank") is not None:
            raise ValueError(f"is {value}; masked language modeling trains all weights, so lora_rank must be unset")
        return value


class RetrievalSettings(FineTuneSettings):
    """The columns of a file of queries and documents."""

    query: str | None = None
    """The column of the query. This column and the next three are found by name or content if not given."""
    document: str | None = None
    """The column of the document, or of a list of documents."""
    negative: str | None = None
    """The column of documents that are not relevant. None: all columns with names such as negative_1."""
    label: str | None = None
    """The column of labels (1 or 0), scores, or a teacher's scores."""


class RerankSettings(RetrievalSettings):
    loss: Literal["bce", "cross_entropy", "margin_mse", "mse"] | None = None
    """None: cross_entropy over lists with negatives, margin_mse for a teacher's scores, bce for labels and scores from
    0 to 1, mse for other scores."""
    negatives: Count = 7
    """For cross_entropy and margin_mse: how many negatives a list has; of more, others are drawn in every epoch."""


class SparseSettings(RetrievalSettings):
    loss: Literal["contrast", "margin_mse", "kl"] | None = None
    """None: margin_mse for a teacher's scores, otherwise contrast with all documents of the batch."""
    temperature: Positive = 1.0
    """Divides the dot products of contrast."""
    negatives: Count = 7
    """How many documents that are not relevant a query has at most."""
    pooling: Literal["max", "sum"] | None = None
    """How the weights of a text's tokens are pooled. None: as the checkpoint does, or max."""
    activation: Literal["relu", "log1p_relu"] | None = None
    """relu: log(1 + relu(x)). log1p_relu: log(1 + log(1 + relu(x))). None: as the checkpoint does, or relu."""
    queries: Literal["encoded", "idf", "learned"] | None = None
    """idf: queries need no encoder, their tokens have fixed weights, by default inverse document frequencies. learned:
    these weights are trained. None: as the checkpoint does, or encoded."""
    document_flops: Annotated[float, Field(ge=0)] = 3e-5
    """The weight of the FLOPS regularizer of documents; a larger one makes vectors sparser."""
    query_flops: Annotated[float, Field(ge=0)] = 5e-5
    """The weight of the FLOPS regularizer of queries."""
    flops_warmup: Annotated[float, Field(gt=0, le=1)] = 1 / 3
    """The share of steps over which both weights rise, with the square of the step."""


class MultiSettings(RetrievalSettings):
    loss: Literal["contrast", "kl", "margin_mse"] | None = None
    """None: kl for scores, else contrast with all other documents of the batch."""
    temperature: Positive = 1.0
    """Divides the scores of contrast, and both sides of kl."""
    dimensions: Count | None = None
    """Numbers per token. None: those of the checkpoint's projection, or 128."""
    query_length: Count | None = None
    """Tokens of a query, which is filled up with mask tokens. None: the checkpoint's, or 32."""


#: By task.
SETTINGS: dict[str, type[FineTuneSettings]] = {
    "classify": ClassifySettings,
    "tag": TagSettings,
    "answer": AnswerSettings,
    "embed": EmbedSettings,
    "rerank": RerankSettings,
    "sparse": SparseSettings,
    "multi": MultiSettings,
}
