"""Pretraining from a recipe: corpus, tokenizer, model, training, evaluation and report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from bertblocks.analysis import summarize
from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.config import BertBlocksConfig
from bertblocks.core.console import make_console
from bertblocks.core.messages import short_repr
from bertblocks.core.requirements import require_packages
from bertblocks.core.storage import atomic_entries, read_json, write_json
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.ops.cpu import flushed_denormals
from bertblocks.objectives import SentenceOrder
from bertblocks.reports.model_card import Card, write_card
from bertblocks.reports.page import flatten
from bertblocks.reports.report import write_report_if_possible
from bertblocks.reports.runs import read_run, write_facts
from bertblocks.text.tokenizers import save_tokenizer
from bertblocks.text.vocabulary import Vocabulary
from bertblocks.training.build import DEFAULT_PRESET, TOKEN_KEYS, build_model, build_objectives, check_model
from bertblocks.training.checkpoints import describe_removed
from bertblocks.training.corpora import TokenizedCorpus, prepare_corpus
from bertblocks.training.distributed import World, join, to_full
from bertblocks.training.held_out import FilledMask, HeldOutEvaluator, UnigramBaseline, fill_masks
from bertblocks.training.loop import Outcome, Trainer
from bertblocks.training.pretraining_task import PretrainingTask
from bertblocks.training.progress import Progress
from bertblocks.training.recipe import Recipe
from bertblocks.training.run_folder import RunFolder, RunFolderError
from bertblocks.training.state import Snapshot, TrainState
from bertblocks.training.trackers import get_trackers
from bertblocks.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE, RESULT = "recipe.json", "result.json"
#: Keys that may change when a run continues, because they do not change what it computes.
FREE_KEYS = {"description", "corpus.workers", "run"}
BOUND_KEYS = {"run.seed", "run.ema", "run.checkpoints.average"}
#: Config keys that follow from sizes and tokenizer, or that do not define the architecture.
DERIVED_KEYS = {
    *("vocab_size", "embedding_size", "head_dim", "num_kv_heads", "num_hidden_groups", "layer_types"),
    *("architectures", "dtype", "transformers_version"),
}
#: How to start a run over.
RUN_REMEDY = "set another run.folder, or delete this folder"
#: The number of filled masks shown at the end.
SHOWN_MASKS = 5


@dataclass(frozen=True)
class PretrainResult:
    """The result of a run. Without metrics if a signal stopped it early."""

    folder: Path
    #: How training ended; of a run that had finished before, only the step is known.
    outcome: Outcome
    #: Whether this is the main process, which prints the result.
    is_main: bool
    metrics: dict[str, float]
    filled: list[FilledMask]

    @property
    def signal(self) -> int | None:
        return self.outcome.signal


@flushed_denormals()
def pretrain(
    recipe: Recipe,
    console: Console | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> PretrainResult:
    """Runs a recipe in its folder, or continues the run there.

    `on_event` receives the lines of metrics.jsonl as they are written.
    """
    require_packages(_packages(recipe), "pretrain")
    world, console = join(recipe.run.device), console or make_console()
    progress = Progress(console, is_shown=world.is_main)
    claim = run_folder(recipe)
    world.run_on_main(claim.claim)
    try:
        return _read_finished(recipe, world, progress) or _run(recipe, world, progress, on_event)
    finally:
        claim.release()


def _read_finished(recipe: Recipe, world: World, progress: Progress) -> PretrainResult | None:
    """The result of a run that has already finished in the folder."""
    file = recipe.folder / RESULT
    if not file.is_file():
        return None
    values = read_json(file)
    try:
        filled = [FilledMask(**text) for text in values["filled"]]
        metrics = dict(values["metrics"])
    except (KeyError, TypeError) as error:
        raise RunFolderError(f"{file} is damaged ({error}); delete this file to finish the run again.") from error
    progress.print(f"{recipe.folder} holds this run, finished; {RUN_REMEDY} to train again.")
    step = values.get("step", TrainingPlan(recipe).total_steps)  # earlier versions wrote no step
    outcome = Outcome(TrainState(step=step), signal=None, evaluation={})
    return PretrainResult(recipe.folder, outcome, world.is_main, metrics, filled)


def _packages(recipe: Recipe) -> list[str]:
    """The optional packages of a run: token stores are Arrow files, which `datasets` writes and reads."""
    return list(dict.fromkeys(["datasets", "pyarrow", *recipe.run.trackers]))


def _run(
    recipe: Recipe, world: World, progress: Progress, on_event: Callable[[dict[str, Any]], None] | None
) -> PretrainResult:
    folder, plan = recipe.folder, TrainingPlan(recipe)
    check_model(plan)
    trackers = get_trackers(recipe.run.trackers, folder, recipe.name, on_event) if world.is_main else []
    corpus = prepare_corpus(recipe, world, progress)
    torch.manual_seed(recipe.run.seed)
    model = build_model(plan, corpus.tokenizer)
    objectives = build_objectives(plan, corpus.tokenizer, model.config)
    vocabulary = Vocabulary.from_tokenizer(corpus.tokenizer)
    is_ordered = isinstance(objectives[0], SentenceOrder)
    held_out = HeldOutEvaluator(
        corpus.held_out,
        vocabulary,
        plan.phases[0].length,
        recipe.run.evaluation.tokens,
        SentenceOrder(vocabulary, token_types=model.config.type_vocab_size >= 2) if is_ordered else None,
    )
    task = PretrainingTask(plan, corpus.sources, objectives, held_out)
    for line in implied_keys(recipe, model.config):
        progress.print(line)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    world.run_on_main(lambda: _write_facts(recipe, corpus, parameters))
    progress.print(
        f"Model: {parameters:,} parameters. "
        f"Run: {plan.total_steps:,} steps, {plan.total_tokens:,} tokens, {world.size} process(es)."
    )

    def write_extras(target: Path) -> None:
        save_tokenizer(corpus.tokenizer, target)
        write_json(target / RECIPE, recipe.record())

    trainer = Trainer(
        model,
        task,
        recipe.optimizer.build,
        recipe.run,
        folder,
        world,
        progress,
        clip=recipe.optimizer.clip,
        trackers=trackers,
        write_extras=write_extras,
    )
    outcome = trainer.train(recipe.record())
    if outcome.signal is not None:
        return PretrainResult(folder, outcome, world.is_main, {}, [])
    if count := recipe.run.checkpoints.average:
        trainer.average_checkpoints(count)
    result = _finish(recipe, world, corpus, held_out, trainer, outcome)

    def remove_checkpoints() -> None:
        if sizes := trainer.checkpoints.remove_finished():
            progress.print(describe_removed(sizes, "run.checkpoints.keep=all"))

    world.run_on_main(remove_checkpoints)
    return result


def _write_facts(recipe: Recipe, corpus: TokenizedCorpus, parameters: int) -> None:
    """Records how the run was started. The fingerprint of a token store stands for its texts and its tokenizer."""
    data = {name: subset.store.fingerprint for name, subset in corpus.train.items()}
    write_facts(recipe.folder, recipe.name, data, {"parameters": parameters, "threads": torch.get_num_threads()})


def implied_keys(recipe: Recipe, config: BertBlocksConfig) -> list[str]:
    """Lines that name the config keys which differ from the preset although the recipe does not set them."""
    given = recipe.model.config
    if not given or recipe.model.checkpoint:
        return []
    preset = BertBlocksConfig.from_preset(recipe.model.preset or DEFAULT_PRESET).to_dict()
    own = {*given, *TOKEN_KEYS, *DERIVED_KEYS}
    implied = {key: value for key, value in config.to_dict().items() if key not in own and value != preset.get(key)}
    if not implied:
        return []
    return [f"model.config implies {', '.join(f'{key}={short_repr(value)}' for key, value in implied.items())}."]


def _finish(
    recipe: Recipe,
    world: World,
    corpus: TokenizedCorpus,
    held_out: HeldOutEvaluator,
    trainer: Trainer,
    outcome: Outcome,
) -> PretrainResult:
    """Evaluates the finished model, and writes it with its report and, last, the file that completes the run."""
    with trainer.evaluation_weights():
        metrics = held_out.evaluate(trainer.model)
        filled: list[FilledMask] = []
        if trainer.model.config.causal:
            metrics["perplexity"] = math.exp(metrics["held_out_loss"])
        else:
            if tokens := recipe.run.evaluation.pseudo_perplexity_tokens:
                metrics["pseudo_perplexity"] = held_out.pseudo_perplexity(trainer.model, tokens)
            filled = fill_masks(trainer.model, corpus.tokenizer, held_out, SHOWN_MASKS)
        unigram = UnigramBaseline.count(corpus.train.values(), len(corpus.tokenizer))
        parts = held_out.evaluate_parts(trainer.model, unigram)
        card = _card(recipe, metrics, trainer.model.config, outcome.state)
        for name, snapshot in final_models(trainer.model).items():
            world.run_on_main(partial(write_model, recipe.folder / name, snapshot, corpus.tokenizer, card))
    metrics |= unigram.evaluate(held_out.targets_for(trainer.model))
    state = outcome.state
    facts = {
        **{f"corpus: {key.replace('_', ' ')}": count for key, count in corpus.counts.items()},
        "tokenizer": recipe.tokenizer_origin or f"{recipe.tokenizer.kind}, trained on the corpus",
        "tokenizer entries": len(corpus.tokenizer),
        "steps": state.step,
        "tokens trained on": state.tokens,
        "precision": state.precision,
        "processes": world.size,
    }

    def write() -> None:
        config = trainer.model.config
        values = {
            "step": state.step,
            "metrics": metrics,
            "filled": [asdict(text) for text in filled],
            "summary": f"{recipe.description}. {summarize(config)}.".removeprefix(". "),
            "facts": facts,
            **parts,
            "config": {key: value for key, value in config.to_diff_dict().items() if not key.startswith("_")},
        }
        write_report_if_possible(replace(read_run(recipe.folder), results=values, state="finished"))
        write_json(recipe.folder / RESULT, values)

    world.run_on_main(write)
    return PretrainResult(recipe.folder, outcome, world.is_main, metrics, filled)


def final_models(model: BertBlocksPreTrainedModel) -> dict[str, Snapshot]:
    """The models that a run writes, by the names of their folders."""
    snapshots = {}
    for name, part in model.written().items():
        part.config.architectures = [type(part).__name__]
        snapshots[name] = Snapshot(part, [], None)
        changed = model.written_weights(name).items()
        snapshots[name].weights |= {key: to_full(weight.detach()).cpu() for key, weight in changed}
    return snapshots


def write_model(folder: Path, snapshot: Snapshot, tokenizer: PreTrainedTokenizerBase, card: Card) -> None:
    """Writes a model, its tokenizer and its card atomically, replacing an earlier version of the run."""
    with atomic_entries(folder.parent) as scratch:
        snapshot.write_model(scratch / folder.name)
        save_tokenizer(tokenizer, scratch / folder.name)
        write_card(scratch / folder.name, card, target=folder)


def _card(recipe: Recipe, metrics: dict[str, float], config: BertBlocksConfig, state: TrainState) -> Card:
    sources = [source for source in (recipe.model.checkpoint, recipe.model.grow_from) if source]
    corpora = recipe.corpus.sources
    return Card(
        recipe.name,
        f"{recipe.description}. An encoder that was pretrained with BertBlocks on {state.tokens:,} tokens: "
        f"{summarize(config)}.".removeprefix(". "),
        sources=[find_checkpoint(source) for source in sources],
        relation="finetune" if recipe.model.checkpoint else None,
        data=[source.dataset or source.name for source in corpora],
        datasets=[source.dataset.partition(":")[0] for source in corpora if source.dataset],
        scores=metrics,
        scored_on="held-out texts of the corpus",
        limitations=["It is an encoder to be fine-tuned, not a finished application."],
        settings=flatten(recipe.record()),
    )


def run_folder(recipe: Recipe) -> RunFolder:
    return RunFolder(
        recipe.folder, RECIPE, recipe.record(), is_free=is_free_key, remedy=RUN_REMEDY, upgrade=_upgrade_record
    )


def _upgrade_record(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe that an earlier version recorded, with keys that were renamed or added since."""
    try:
        return Recipe.model_validate(values).record()
    except ValueError:  # a newer version wrote it, or its objects are not registered: any difference is reported
        return values


def is_free_key(key: str) -> bool:
    """Whether a key of the recipe may change when a run continues.

    Example:
        >>> is_free_key("run.device"), is_free_key("run.seed")
        (True, False)
    """
    return key not in BOUND_KEYS and any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
