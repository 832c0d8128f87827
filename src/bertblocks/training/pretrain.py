"""Pretraining from a recipe: texts, tokenizer, model, training, evaluation, and what is left in the run's folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from bertblocks.core.storage import atomic_entries, write_json
from bertblocks.nn.ops.cpu import flushed_denormals
from bertblocks.reports.page import write_pretraining_report
from bertblocks.text.vocabulary import Vocabulary
from bertblocks.training.build import build_model, build_objectives
from bertblocks.training.corpora import Texts, make_texts
from bertblocks.training.distributed import World, join
from bertblocks.training.held_out import FilledMask, HeldOut, Unigram, fill_masks
from bertblocks.training.loop import Outcome, Trainer
from bertblocks.training.optimizers import get_optimizers
from bertblocks.training.packed_task import PackedTask
from bertblocks.training.progress import Progress
from bertblocks.training.recipe import Recipe
from bertblocks.training.run_folder import RunFolder
from bertblocks.training.state import Snapshot
from bertblocks.training.trackers import get_trackers
from bertblocks.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE, RESULT = "recipe.json", "result.json"
#: What may differ when a run is continued: how it runs, not what it computes.
FREE_KEYS = {"description", "corpus.workers", "run"}
BOUND_KEYS = {"run.seed", "run.ema"}
#: Hidden words that are shown at the end.
SHOWN_MASKS = 5


@dataclass(frozen=True)
class Pretrained:
    """What a run has come to. `signal` is the one that ended it early; then there are no metrics yet."""

    folder: Path
    outcome: Outcome
    #: Whether this is the process that speaks for all.
    is_main: bool
    metrics: dict[str, float]
    filled: list[FilledMask]

    @property
    def signal(self) -> int | None:
        return self.outcome.signal


@flushed_denormals()
def pretrain(recipe: Recipe, console: Console | None = None) -> Pretrained:
    """Runs a recipe in its folder, or continues the run that is there."""
    world, console = join(recipe.run.device), console or Console()
    progress = Progress(console, is_shown=world.is_main)
    claim = run_folder(recipe)
    world.run_on_main(claim.claim)
    try:
        return _run(recipe, world, progress)
    finally:
        claim.release()


def _run(recipe: Recipe, world: World, progress: Progress) -> Pretrained:
    folder = recipe.folder
    trackers = get_trackers(recipe.run.trackers if world.is_main else [], folder, recipe.name)
    texts = make_texts(recipe, world, progress)
    torch.manual_seed(recipe.run.seed)
    model = build_model(recipe, texts.tokenizer)
    held_out = _held_out(recipe, texts)
    task = PackedTask(recipe, texts.train, build_objectives(recipe, texts.tokenizer, model.config), held_out)
    progress.say(
        f"Model: {sum(one.numel() for one in model.parameters()):,} parameters. "
        f"Run: {task.total_steps:,} steps, {task.plan.total_tokens:,} tokens, {world.size} process(es)."
    )

    def write_extras(target: Path) -> None:
        texts.tokenizer.save_pretrained(target)
        write_json(target / RECIPE, recipe.model_dump(mode="json"))

    trainer = Trainer(
        model,
        task,
        lambda model: get_optimizers(model, recipe.optimizer),
        recipe.run,
        folder,
        world,
        progress,
        clip=recipe.optimizer.clip,
        trackers=trackers,
        write_extras=write_extras,
    )
    outcome = trainer.train(recipe.model_dump(mode="json"))
    if outcome.signal is not None:
        return Pretrained(folder, outcome, world.is_main, {}, [])
    return _finish(recipe, world, texts, held_out, trainer, outcome)


def _held_out(recipe: Recipe, texts: Texts) -> HeldOut:
    vocabulary = Vocabulary.from_tokenizer(texts.tokenizer)
    length = TrainingPlan(recipe).phases[0].length
    return HeldOut(texts.held_out, vocabulary, length, recipe.run.evaluation.tokens)


def _finish(
    recipe: Recipe, world: World, texts: Texts, held_out: HeldOut, trainer: Trainer, outcome: Outcome
) -> Pretrained:
    """Measures the finished model and writes it."""
    with trainer.weights_in_use():
        metrics = held_out.evaluate(trainer.model)
        if wanted := recipe.run.evaluation.pseudo_perplexity_tokens:
            metrics["pseudo_perplexity"] = held_out.pseudo_perplexity(trainer.model, wanted)
        filled = fill_masks(trainer.model, texts.tokenizer, held_out, SHOWN_MASKS)
        snapshot = Snapshot(trainer.model, [], None)
        world.run_on_main(lambda: write_model(recipe.folder / "model", snapshot, texts.tokenizer))
    metrics |= Unigram.count(texts.train.values(), len(texts.tokenizer)).evaluate(held_out.targets)
    state = outcome.state
    facts = {
        **{f"corpus: {key.replace('_', ' ')}": count for key, count in texts.counts.items()},
        "steps": state.step,
        "tokens trained on": state.tokens,
        "seconds in steps": round(state.seconds, 1),
        "tokens per second": round(state.tokens / max(state.seconds, 1e-9)),
        "precision": state.precision,
        "processes": world.size,
    }

    def write() -> None:
        write_json(recipe.folder / RESULT, {"metrics": metrics, "filled": [asdict(one) for one in filled]})
        write_pretraining_report(recipe, trainer.model.config, facts, metrics, filled)

    world.run_on_main(write)
    return Pretrained(recipe.folder, outcome, world.is_main, metrics, filled)


def write_model(folder: Path, snapshot: Snapshot, tokenizer: PreTrainedTokenizerBase) -> None:
    """A model and its tokenizer, complete or absent; one that the run wrote before is replaced."""
    with atomic_entries(folder.parent) as scratch:
        snapshot.write_model(scratch / folder.name)
        tokenizer.save_pretrained(scratch / folder.name)


def run_folder(recipe: Recipe) -> RunFolder:
    return RunFolder(
        recipe.folder,
        RECIPE,
        recipe.model_dump(mode="json"),
        is_free=is_free_key,
        remedy="give another run.folder, or delete this one",
    )


def is_free_key(key: str) -> bool:
    """Whether a run that is continued may have another value for a key of its recipe.

    Example:
        >>> is_free_key("run.device"), is_free_key("run.seed")
        (True, False)
    """
    return key not in BOUND_KEYS and any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
