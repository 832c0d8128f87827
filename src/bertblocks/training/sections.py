"""The sections of a recipe: their keys, allowed values and defaults, which are those of the demo.

Amounts are in steps (`2000`), in tokens (`"3B tokens"`) or a percentage (`"10%"`). A token is a slot of a packed batch,
so a plan is exact before the run starts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bertblocks.core.settings import Count, Positive, Section, Share
from bertblocks.training.amounts import AmountField, Duration
from bertblocks.training.anomalies import Anomalies
from bertblocks.training.objective_sections import OBJECTIVES, MaskRateSchedule, ObjectiveSection, Rate
from bertblocks.training.schedules import SCHEDULES, ScheduleSection


class Model(Section):
    preset: str | None = None
    """A named architecture (see `bertblocks presets`). Default: modernbert-base, unless checkpoint is set."""
    config: dict[str, Any] = {}
    """Config keys that override the preset. By default the tokenizer sets vocab_size."""
    checkpoint: str | None = None
    """A checkpoint of any family to continue from: a folder or a Hub id."""
    grow_from: str | None = None
    """A checkpoint of a smaller model of the same kind, whose weights initialize the model of preset and config."""

    @model_validator(mode="after")
    def _one_start(self) -> Model:
        if self.checkpoint and (self.preset or self.config or self.grow_from):
            raise ValueError("has a checkpoint, which already defines the model: remove preset, config and grow_from")
        return self


class Tokenizer(Section):
    kind: Literal["wordpiece", "bpe"] = "wordpiece"
    """The kind of tokenizer to train on the corpus."""
    vocab_size: Annotated[int, Field(ge=16)] = 8192
    """The size of the trained vocabulary, including special tokens."""
    load: str | None = None
    """A tokenizer to load instead of training one: a folder or a Hub id. Implied by model.checkpoint."""

    @model_validator(mode="after")
    def _trained_or_loaded(self) -> Tokenizer:
        fields = type(self).model_fields
        if self.load and (self.kind, self.vocab_size) != (fields["kind"].default, fields["vocab_size"].default):
            raise ValueError("has load, so no tokenizer is trained: remove kind and vocab_size")
        return self


Threshold = Annotated[float, Field(gt=0, le=1)]


class CorpusSource(Section):
    """A source of texts: exactly one of `files`, `dataset`, `builtin` and `tokens`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] = "docstrings"
    """The name in mixtures and reports, and of the token folder: letters, digits, `.`, `_` and `-`."""
    files: list[str] | None = None
    """Files, folders, globs and addresses of .txt, .jsonl, .csv and .parquet files, optionally as .gz or .zst."""
    dataset: str | None = None
    """A dataset of the `datasets` library, as NAME or NAME:CONFIG."""
    builtin: Literal["docstrings"] | None = None
    """The docstrings of Python and the installed packages."""
    tokens: str | None = None
    """A folder that `bertblocks data prepare` wrote with the tokenizer that `tokenizer.load` names, or its address,
    such as s3://bucket/tokens; its files come into a local folder (BERTBLOCKS_CACHE) when they are first used."""
    column: str = "text"
    """The column or key that holds the text."""
    one_per: Literal["paragraph", "line", "file"] = "paragraph"
    """What counts as a document in a .txt file. Blank lines separate paragraphs."""
    split: str = "train"
    """The split of a dataset."""
    stream: Count | None = None
    """Streams the source: this many of its shards (files of a dataset, 64 MB of files) are read and tokenized at a
    time, while the model trains, and deleted after use. None: all texts are tokenized before training starts."""
    dedup: Threshold | None = None
    """Removes near-duplicates, texts whose 5-word sequences have at least this Jaccard similarity with those of an
    earlier text. 0.8 is common."""
    weight: Positive = 1.0
    """The share of tokens drawn from this source, relative to the other sources."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Documents with fewer tokens are skipped."""

    @model_validator(mode="after")
    def _one_origin(self) -> CorpusSource:
        origins = ("files", "dataset", "builtin", "tokens")
        given = [key for key in origins if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(f"has {' and '.join(given) or 'no origin'}; set exactly one of {', '.join(origins)}")
        if self.stream and (self.builtin or self.tokens):
            raise ValueError("has stream, which works with files and dataset only; remove it")
        if self.dedup and self.tokens:
            raise ValueError(
                "has dedup, but its texts are tokenized already; pass --dedup to `bertblocks data prepare`"
            )
        if self.stream and self.dedup:
            raise ValueError(
                "has stream and dedup, which must see all texts before training starts; remove one of them"
            )
        return self


class Corpus(Section):
    sources: Annotated[list[CorpusSource], Field(min_length=1)] = [CorpusSource(builtin="docstrings")]
    """Several sources are mixed according to their weights."""
    temperature: Positive | None = None
    """Multiplies the weight of a source by its number of tokens to the power of 1 / temperature, so that small sources,
    such as rare languages, are drawn more often than their size but less than large ones. None: weights alone."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """The share of documents (packages, for docstrings) held out for evaluation."""
    max_bad_share: Share = 0.01
    """Unreadable records are counted and reported. A larger share of them stops the run."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that tokenize. 0 means one per core."""

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, sources: list[CorpusSource]) -> list[CorpusSource]:
        names = [source.name for source in sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"has the name {twice[0]!r} twice; mixtures and reports need distinct names")
        if "tokenizer" in names:
            raise ValueError("has the name 'tokenizer', which is reserved for the run's tokenizer; choose another name")
        return sources

    @model_validator(mode="after")
    def _sizes_are_known(self) -> Corpus:
        streamed = [source.name for source in self.sources if source.stream]
        if streamed and self.temperature is not None:
            raise ValueError(
                f"has a temperature, but the size of the streamed source {streamed[0]!r} is unknown; set weights"
            )
        return self


class BatchWarmup(Section):
    """The batch grows linearly from `start` tokens to batch_tokens."""

    start: Count
    over: AmountField


class ThetaSchedule(Section):
    """A RoPE theta that moves linearly from one value to another over a phase. Later phases keep the last one."""

    start: Positive
    end: Positive


class Phase(Section):
    """A part of the run. Keys that a phase does not set keep their values from the previous phase."""

    name: str | None = None
    duration: Duration
    """The duration in steps or tokens."""
    length: Annotated[int, Field(ge=8)] | None = None
    """The length of a packed row in tokens; longer documents are split. Default: 128."""
    min_length: Annotated[int, Field(ge=8)] | None = None
    """Splits each document at a length of its own, drawn between this and `length`, as in EuroBERT (Boizard et al.,
    2025). Default: `length`."""
    batch_tokens: Count | None = None
    """The tokens of a global batch, independent of the number of processes. Default: 4,096."""
    batch_warmup: BatchWarmup | None = None
    """Applies to this phase only."""
    objective: Annotated[ObjectiveSection, OBJECTIVES] | None = None
    """Another objective, for the same model."""
    mask_rate: Rate | MaskRateSchedule | None = None
    """Overrides the objective's rate."""
    rope_theta: Positive | ThetaSchedule | None = None
    """A new RoPE theta for the global layers: at once, or step by step over the phase."""
    causal: bool | None = None
    """Whether tokens see only earlier ones, from this phase on."""
    mixture: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Weights of sources by name, which override their own. Sources that are not listed are not used."""
    curriculum: Annotated[int, Field(ge=2)] | None = None
    """Visits documents from short to long over this phase, in this many grades of equal size, shuffled within each.
    Applies to this phase only."""
    lr: Positive | None = None
    """A new peak learning rate."""
    schedule: Annotated[ScheduleSection, SCHEDULES] | None = None
    """A schedule for this phase only. The recipe's schedule spans all phases without one."""


class Checkpoints(Section):
    every: Count = 250
    """Steps between checkpoints. A checkpoint is also written at the end, on SIGTERM and on Ctrl-C."""
    keep: Count | Literal["all"] = 2
    """The number of newest checkpoints to keep while the run trains. A finished run keeps its model and milestones;
    with all, it keeps every checkpoint."""
    milestones: Count | None = None
    """Checkpoints at multiples of this many steps are never removed."""
    average: Annotated[int, Field(ge=2)] | None = None
    """Makes the final model the mean of this many last checkpoints (Izmailov et al., 2018), which `every` spaces."""

    @model_validator(mode="after")
    def _keeps_averaged(self) -> Checkpoints:
        if self.average is not None and self.keep != "all" and self.keep < self.average:
            raise ValueError(f"has average: {self.average}, but keep is {self.keep}; keep at least {self.average}")
        return self

    @property
    def kept(self) -> int | None:
        """The number of newest checkpoints to keep; None means all."""
        return None if self.keep == "all" else self.keep


class Evaluation(Section):
    every: Count | None = 250
    """Steps between evaluations on held-out texts. None means at the end only."""
    tokens: Count = 40_000
    """The maximum number of held-out tokens to evaluate on."""
    pseudo_perplexity_tokens: Annotated[int, Field(ge=0)] = 1_000
    """Tokens for the pseudo-perplexity at the end, masked one at a time. 0 skips it."""


class Run(Section):
    folder: str | None = None
    """The run's folder. Default: runs/NAME."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto means bf16 where the hardware has bf16 units, and fp32 elsewhere. fp16 uses loss scaling."""
    parallel: Literal["ddp", "fsdp", "hybrid"] = "ddp"
    """Data parallelism over processes: a full copy of the model each (ddp), a shard each (FSDP2), or a copy in each
    group of processes, in which each has a shard (hybrid)."""
    shard_over: Count | None = None
    """The processes of a group under hybrid. None: those of a node."""
    micro_batch_tokens: Count | None = None
    """Tokens per forward pass of a process; gradients accumulate over micro-batches. None: no accumulation."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recomputes layers in the backward pass to save memory. `selective` keeps matrix products and attention."""
    compile: bool = False
    """Compiles layers with torch.compile: whole ones if their attention is one operation (without dropout, biases,
    sinks and global tokens), and their feed-forward networks otherwise."""
    activation_memory_budget: Share | None = None
    """The share of activations that compiled layers keep for the backward pass. None: all that are useful."""
    deterministic: bool = True
    """Computes gradients on CUDA in a fixed order, without which a resumed run may differ in rounding."""
    flash_attention: Literal["FA3", "FA4"] | None = None
    """The version of flash attention that torch runs on CUDA, from its own package. None: the one in torch."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The decay per step of an exponential moving average of the weights, which is evaluated and saved as the model."""
    log_every: Count = 10
    """Steps between lines in metrics.jsonl."""
    profile: Count | None = None
    """Profiles this many steps, from the third on, into profile/trace.json (for Chrome or Perfetto) and table.txt."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []
    hang_after: Positive | None = 1800.0
    """Seconds after which a process of several, whose step or evaluation does not end, reports the step of each process
    and exits, so that torchrun starts all again. None: never."""
    anomalies: Anomalies = Anomalies()
    """What to do about losses that are not finite or much higher than before."""
    checkpoints: Checkpoints = Checkpoints()
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _budget_of_compiled(self) -> Run:
        if self.activation_memory_budget is not None and not self.compile:
            raise ValueError("has activation_memory_budget, which applies to compiled layers only; set compile to true")
        return self

    @model_validator(mode="after")
    def _one_average(self) -> Run:
        if self.ema is not None and self.checkpoints.average is not None:
            raise ValueError("has ema and checkpoints.average; the final model can be one of these means: remove one")
        return self
