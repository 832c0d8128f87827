"""The sections of a recipe: which keys there are, what they may hold, and the defaults, which are the demo's.

Amounts are numbers of steps (`2000`), of tokens (`"3B tokens"`), or a share (`"10%"`); a token is a slot of a packed
batch, so that plans are exact beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from bertblocks.core.settings import Count, Positive, Section, Share
from bertblocks.training.amounts import Amount, AmountField, Duration


def _by_kind(default: str) -> Discriminator:
    """Chooses a section by its `kind`, which may be left out."""

    def read(value: Any) -> Any:
        return value.get("kind", default) if isinstance(value, Mapping) else getattr(value, "kind", default)

    return Discriminator(read)


# ---------------------------------------------------------------------- sections


class Model(Section):
    preset: str | None = None
    """A known architecture (see `bertblocks presets`). By default modernbert-base, unless checkpoint is given."""
    config: dict[str, Any] = {}
    """Keys of the model's config that differ from the preset. vocab_size follows from the tokenizer by default."""
    checkpoint: str | None = None
    """A checkpoint to continue from, of any family: a folder or a hub id."""
    grow_from: str | None = None
    """A checkpoint of a smaller model of the same kind, whose weights the model of preset and config starts from."""

    @model_validator(mode="after")
    def _one_start(self) -> Model:
        if self.checkpoint and (self.preset or self.config or self.grow_from):
            raise ValueError("has a checkpoint, which says what the model is: leave out preset, config and grow_from")
        return self


class Tokenizer(Section):
    kind: Literal["wordpiece", "bpe"] = "wordpiece"
    """What is trained on the corpus."""
    vocab_size: Annotated[int, Field(ge=16)] = 8192
    """Entries of the trained vocabulary, special tokens included."""
    load: str | None = None
    """A tokenizer to load in place of training one: a folder or a hub id. Implied by model.checkpoint."""

    @model_validator(mode="after")
    def _trained_or_loaded(self) -> Tokenizer:
        fields = type(self).model_fields
        if self.load and (self.kind, self.vocab_size) != (fields["kind"].default, fields["vocab_size"].default):
            raise ValueError("has load, so nothing is trained: leave out kind and vocab_size")
        return self


class CorpusSource(Section):
    """Where texts come from: exactly one of `files`, `dataset`, `builtin` and `tokens`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] = "docstrings"
    """Names the source in mixtures and reports, and its folder of tokens: letters, digits, `.`, `_` and `-`."""
    files: list[str] | None = None
    """Files, folders and globs of .txt, .jsonl, .csv and .parquet, each also with .gz or .zst."""
    dataset: str | None = None
    """A name of the `datasets` library, or NAME:CONFIG."""
    builtin: Literal["docstrings"] | None = None
    """The documentation strings of Python and of the installed packages."""
    tokens: str | None = None
    """A folder that `bertblocks data prepare` wrote, with the tokenizer that `tokenizer.load` names."""
    column: str = "text"
    """The column or key that holds the text."""
    one_per: Literal["paragraph", "line", "file"] = "paragraph"
    """What a document is in a .txt file; paragraphs have blank lines between them."""
    split: str = "train"
    """The split of a dataset."""
    weight: Positive = 1.0
    """The share of tokens drawn from this source, relative to the others."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Documents with fewer tokens are left out."""

    @model_validator(mode="after")
    def _one_origin(self) -> CorpusSource:
        origins = ("files", "dataset", "builtin", "tokens")
        given = [key for key in origins if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(f"has {' and '.join(given) or 'no origin'}; give exactly one of {', '.join(origins)}")
        return self


class Corpus(Section):
    sources: Annotated[list[CorpusSource], Field(min_length=1)] = [CorpusSource(builtin="docstrings")]
    """Several sources are mixed by their weights."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """The share of documents (of packages, for docstrings) that is kept for evaluation."""
    max_bad_share: Share = 0.01
    """Records that cannot be read are counted and named; more than this share of them stops the run."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that tokenise. 0: one for each core."""

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, sources: list[CorpusSource]) -> list[CorpusSource]:
        names = [source.name for source in sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"has the name {twice[0]!r} twice; mixtures and reports need names that differ")
        if "tokenizer" in names:
            raise ValueError("has the name 'tokenizer', which is the folder of the run's tokenizer; choose another")
        return sources


Rate = Annotated[float, Field(gt=0, lt=1)]


class ChangingRate(Section):
    """A rate that goes from one value to another over a phase."""

    start: Rate
    end: Rate
    kind: Literal["linear", "cosine"] = "linear"


class MaskedLM(Section):
    kind: Literal["masked_lm"] = "masked_lm"
    rate: Rate | ChangingRate = 0.3
    """The share of tokens that is hidden and predicted, or its way from start to end of a phase."""
    mask_share: Share = 0.8
    """Of these, the share replaced by [MASK]."""
    random_share: Share = 0.1
    """The share replaced by a random token; the rest is kept as it is."""
    whole_word: bool = False
    """All tokens of a word are chosen together."""
    spans: bool = False
    """Tokens (words, if whole_word) are chosen in spans."""
    sentence_order: bool = False
    """Sentence order prediction beside it."""

    @model_validator(mode="after")
    def _shares(self) -> MaskedLM:
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(f"has mask_share {self.mask_share} and random_share {self.random_share}: more than 1")
        return self


class SentenceOrder(Section):
    kind: Literal["sentence_order"]


class MaskedDiffusion(Section):
    kind: Literal["masked_diffusion"]


Objective = Annotated[
    Annotated[MaskedLM, Tag("masked_lm")]
    | Annotated[SentenceOrder, Tag("sentence_order")]
    | Annotated[MaskedDiffusion, Tag("masked_diffusion")],
    _by_kind("masked_lm"),
]


class AdamW(Section):
    kind: Literal["adamw"] = "adamw"
    lr: Positive = 1e-3
    """The peak learning rate."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.98]
    eps: Positive = 1e-6
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled, on matrices and embeddings; never on norms, biases and scales."""
    clip: Positive | None = 1.0
    """The largest norm of all gradients together. None: no clipping."""


class StableAdamW(AdamW):
    """AdamW whose updates are clipped per tensor (Wortsman et al., 2023), so that gradients need no clipping."""

    kind: Literal["stable_adamw"]  # type: ignore[assignment]
    clip: Positive | None = None


class Muon(AdamW):
    """Orthogonalised momentum (Jordan et al., 2024) for the matrices inside layers, AdamW for the rest.

    Updates are scaled to the size of AdamW's (Liu et al., 2025), so both use one learning rate and one decay.
    """

    kind: Literal["muon"]  # type: ignore[assignment]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95


Optimizer = Annotated[
    Annotated[AdamW, Tag("adamw")] | Annotated[StableAdamW, Tag("stable_adamw")] | Annotated[Muon, Tag("muon")],
    _by_kind("adamw"),
]


class Constant(Section):
    kind: Literal["constant"]
    warmup: AmountField = Amount(0, "steps")
    """The rate rises in a straight line over this amount."""


class Linear(Section):
    kind: Literal["linear"]
    warmup: AmountField = Amount(0, "steps")
    final: Share = 0.0
    """What is left of the peak at the end."""
    until: AmountField = Amount(100, "%")
    """Where the end is reached; the rate stays there."""


class Cosine(Linear):
    kind: Literal["cosine"]  # type: ignore[assignment]


class WSD(Section):
    """Warm-up, stable, decay (Hu et al., 2024)."""

    kind: Literal["wsd"] = "wsd"
    warmup: AmountField = Amount(5, "%")
    decay: AmountField = Amount(30, "%")
    """How long the last part is, in which the rate falls."""
    shape: Literal["linear", "sqrt"] = "sqrt"
    """How it falls: in a straight line, or as 1 - sqrt."""
    final: Share = 0.0


Schedule = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[Linear, Tag("linear")]
    | Annotated[Cosine, Tag("cosine")]
    | Annotated[WSD, Tag("wsd")],
    _by_kind("wsd"),
]


class BatchWarmup(Section):
    """The batch grows in a straight line from `start` tokens to batch_tokens."""

    start: Count
    over: AmountField


class Phase(Section):
    """A part of the run. What a phase does not say is as in the phase before."""

    name: str | None = None
    duration: Duration
    """In steps or tokens."""
    length: Annotated[int, Field(ge=8)] | None = None
    """Tokens of a row, and so of the longest piece of a document. 128 if no phase says it."""
    batch_tokens: Count | None = None
    """Tokens of a global batch, whatever the number of processes. 4,096 if no phase says it."""
    batch_warmup: BatchWarmup | None = None
    """For this phase alone."""
    mask_rate: Rate | ChangingRate | None = None
    """In place of the objective's rate."""
    rope_theta: Positive | None = None
    """A new theta for the global layers of a model with RoPE."""
    mixture: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Weights of sources by name, in place of their own; a source that is not named is left out."""
    lr: Positive | None = None
    """A new peak learning rate."""
    schedule: Schedule | None = None
    """A schedule of this phase alone. Phases without one share the recipe's, which spans them all."""


class Checkpoints(Section):
    every: Count = 250
    """Steps between checkpoints; one is also written at the end and on SIGTERM and Ctrl-C."""
    keep: Count = 2
    """The newest so many are kept."""
    milestones: Count | None = None
    """Checkpoints at multiples of so many steps are kept for good."""


class Evaluation(Section):
    every: Count | None = 250
    """Steps between evaluations on a part of the held-out texts. None: at the end only."""
    tokens: Count = 40_000
    """Held-out tokens that are used at most."""
    pseudo_perplexity_tokens: Annotated[int, Field(ge=0)] = 1_000
    """Tokens of the pseudo-perplexity at the end, one of them hidden at a time. 0: not computed."""


class Run(Section):
    folder: str | None = None
    """Where everything goes. By default runs/NAME."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 where the hardware has units for it, fp32 elsewhere. fp16 scales the loss."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes work together: with a copy of the model each, or with a shard of it (FSDP2)."""
    micro_batch_tokens: Count | None = None
    """Tokens that a process takes at once; gradients of several such parts are added up. None: its share at once."""
    gradient_checkpointing: bool = False
    compile: bool = False
    """Layers through torch.compile."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The decay per step of a running mean of the weights, which is then evaluated and written as the model."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []
    checkpoints: Checkpoints = Checkpoints()
    evaluation: Evaluation = Evaluation()
