"""A recipe's corpus and tokenizer, made once in the run's folder and opened by every process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.core.settings import RecipeError
from bertblocks.core.storage import atomic_folder, read_json
from bertblocks.data.corpus import Corpus, DatasetCorpus, FileCorpus
from bertblocks.data.docstrings import docstring_corpus
from bertblocks.data.prepare import TOKENIZER, describe_tokenizer, prepare
from bertblocks.data.tokens import INFO, TokenStore, TokenSubset
from bertblocks.text.tokenizer_training import SAMPLE_BYTES, train_tokenizer
from bertblocks.text.tokenizers import load_fast_tokenizer
from bertblocks.training.checkpoints import CheckpointFolder
from bertblocks.training.distributed import World
from bertblocks.training.progress import Progress
from bertblocks.training.recipe import Recipe
from bertblocks.training.sections import CorpusSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Keys of a source that say how it is used, not what it holds: sources that differ in these alone share their tokens.
USE_KEYS = {"name", "weight", "min_tokens"}


@dataclass(frozen=True)
class Texts:
    """Token ids to train on by source, and those that are held out."""

    tokenizer: PreTrainedTokenizerFast
    train: dict[str, TokenSubset]
    held_out: list[TokenSubset]

    @property
    def counts(self) -> dict[str, int]:
        """Of all different sources together."""
        stores = {id(one.store): one.store for one in self.train.values()}.values()
        return {key: sum(store.counts[key] for store in stores) for key in next(iter(stores)).counts}


def make_texts(recipe: Recipe, world: World, progress: Progress) -> Texts:
    """Gathers, trains and tokenises what is not there yet, in the first process; then all open it."""
    folder = recipe.folder / "data"
    world.run_on_main(lambda: _prepare(recipe, folder, progress))
    tokenizer = load_fast_tokenizer(folder / "tokenizer")
    stores = {one.name: TokenStore(_tokens(recipe, one, folder)) for one in recipe.corpus.sources}
    parts = {name: store.split() for name, store in stores.items()}
    homes = {_home(recipe, one): parts[one.name][1] for one in recipe.corpus.sources}
    held_out = [one for one in homes.values() if len(one)]
    if not held_out:
        raise RecipeError("No text is held out for evaluation; raise corpus.held_out, or give more texts.")
    return Texts(tokenizer, {name: train for name, (train, _) in parts.items()}, held_out)


def _tokens(recipe: Recipe, source: CorpusSource, folder: Path) -> Path:
    return Path(source.tokens) if source.tokens else folder / _home(recipe, source)


def _prepare(recipe: Recipe, folder: Path, progress: Progress) -> None:
    settings = recipe.corpus
    workers = settings.workers or None
    has_begun = bool(CheckpointFolder(recipe.folder / "checkpoints").steps())
    if has_begun and all((_tokens(recipe, one, folder) / INFO).is_file() for one in settings.sources):
        return  # a run keeps the tokens that it began with, whatever has become of the texts
    corpora: dict[str, Corpus] = {}
    for source in settings.sources:
        home = _home(recipe, source)
        if home not in corpora and not source.tokens:
            if source.builtin and not (folder / "docstrings.jsonl").is_file():
                progress.say("Gathering the documentation strings of Python and its packages.")
            corpora[home] = get_corpus(source, folder, settings.held_out, workers)
    tokenizer = _get_tokenizer(recipe, list(corpora.values()), folder / "tokenizer", progress)
    for source in settings.sources:
        if source.tokens:
            _check_tokens(Path(source.tokens), tokenizer)
    for home, corpus in corpora.items():
        store = prepare(corpus, tokenizer, folder / home, workers, settings.max_bad_share, overwrite=True)
        counts = store.counts
        progress.say(
            f"Corpus {home}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, of which "
            f"{counts['held_out_tokens']:,} are held out; {counts['bad_records']:,} bad records."
        )
        for problem in store.bad_records:
            progress.say(f"  {problem}")


def _check_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    TokenStore(folder)  # says what is missing
    if read_json(folder / TOKENIZER) != describe_tokenizer(tokenizer):
        raise RecipeError(
            f"{folder} was made with another tokenizer than the run's; name the one that made it with tokenizer.load."
        )


def _home(recipe: Recipe, source: CorpusSource) -> str:
    """The folder of a source's tokens: that of the first source with the same texts."""
    origin = source.model_dump(exclude=USE_KEYS)
    return next(one.name for one in recipe.corpus.sources if one.model_dump(exclude=USE_KEYS) == origin)


def get_corpus(source: CorpusSource, folder: Path, held_out: float, workers: int | None = None) -> Corpus:
    """What a source of a recipe names; the built-in corpus is gathered into the folder."""
    if source.files:
        return FileCorpus(tuple(source.files), source.column, source.one_per, held_out)
    if source.dataset:
        return DatasetCorpus(source.dataset, source.split, source.column, held_out)
    return docstring_corpus(folder / "docstrings.jsonl", held_out, workers)


def _get_tokenizer(recipe: Recipe, corpora: list[Corpus], folder: Path, progress: Progress) -> PreTrainedTokenizerFast:
    """The run's own copy, or the tokenizer that the recipe names, or a new one."""
    if folder.is_dir():
        return load_fast_tokenizer(folder)
    settings = recipe.tokenizer
    origin = settings.load or recipe.model.checkpoint or recipe.model.grow_from
    if origin:
        tokenizer = load_fast_tokenizer(find_checkpoint(origin))
    else:
        progress.say(f"Training a {settings.kind} tokenizer of {settings.vocab_size:,} entries.")
        samples = [corpus.sample(SAMPLE_BYTES // len(corpora)) for corpus in corpora]
        tokenizer = train_tokenizer(settings.kind, settings.vocab_size, itertools.chain.from_iterable(samples))
    with atomic_folder(folder) as scratch:
        tokenizer.save_pretrained(scratch)
    return load_fast_tokenizer(folder)
