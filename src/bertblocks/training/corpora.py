"""Prepares a recipe's corpus and tokenizer once in the run's folder, for every process to open."""

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
from bertblocks.text.tokenizers import load_fast_tokenizer, save_tokenizer
from bertblocks.training.checkpoints import CheckpointFolder
from bertblocks.training.distributed import World
from bertblocks.training.progress import Progress
from bertblocks.training.recipe import Recipe
from bertblocks.training.sections import CorpusSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Source keys that do not change the texts. Sources that differ only in these share their tokens.
USAGE_KEYS = {"name", "weight", "min_tokens"}


@dataclass(frozen=True)
class TokenizedCorpus:
    """The token ids of a run: the training part of each source, and the held-out parts."""

    tokenizer: PreTrainedTokenizerFast
    train: dict[str, TokenSubset]
    held_out: list[TokenSubset]

    @property
    def counts(self) -> dict[str, int]:
        """Totals over all token stores."""
        stores = {id(subset.store): subset.store for subset in self.train.values()}.values()
        return {key: sum(store.counts[key] for store in stores) for key in next(iter(stores)).counts}


def prepare_corpus(recipe: Recipe, world: World, progress: Progress) -> TokenizedCorpus:
    """Prepares missing texts, tokenizer and tokens in the main process, then opens them in every process."""
    folder = recipe.folder / "data"
    world.run_on_main(lambda: _prepare(recipe, folder, progress))
    tokenizer = load_fast_tokenizer(folder / "tokenizer")
    sources = recipe.corpus.sources
    stores = {source.name: TokenStore(_token_folder(recipe, source, folder)) for source in sources}
    parts = {name: store.split() for name, store in stores.items()}
    distinct = {_owner_name(recipe, source): parts[source.name][1] for source in sources}
    held_out = [subset for subset in distinct.values() if len(subset)]
    if not held_out:
        raise RecipeError("No texts are held out for evaluation; raise corpus.held_out or provide more texts.")
    return TokenizedCorpus(tokenizer, {name: train for name, (train, _) in parts.items()}, held_out)


def _token_folder(recipe: Recipe, source: CorpusSource, folder: Path) -> Path:
    return Path(source.tokens) if source.tokens else folder / _owner_name(recipe, source)


def _prepare(recipe: Recipe, folder: Path, progress: Progress) -> None:
    settings = recipe.corpus
    workers = settings.workers or None
    has_begun = bool(CheckpointFolder(recipe.folder / "checkpoints").steps())
    token_folders = [_token_folder(recipe, source, folder) for source in settings.sources]
    if has_begun and all((path / INFO).is_file() for path in token_folders):
        return  # a run keeps its tokens, even if the texts have changed since
    is_new = not (folder / "tokenizer").is_dir()
    named = _named_tokenizer(recipe) if is_new else None  # before texts are gathered: a wrong name is found at once
    corpora: dict[str, Corpus] = {}
    for source in settings.sources:
        owner = _owner_name(recipe, source)
        if owner not in corpora and not source.tokens:
            if source.builtin and not (folder / "docstrings.jsonl").is_file():
                progress.print("Collecting the docstrings of Python and the installed packages.")
            corpora[owner] = get_corpus(source, folder, settings.held_out, workers)
    tokenizer = _get_tokenizer(recipe, named, list(corpora.values()), folder / "tokenizer", progress)
    for source in settings.sources:
        if source.tokens:
            _check_tokens(Path(source.tokens), tokenizer)
    for name, corpus in corpora.items():
        store = prepare(corpus, tokenizer, folder / name, workers, settings.max_bad_share, overwrite=True)
        counts = store.counts
        progress.print(
            f"Corpus {name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens ("
            f"{counts['held_out_tokens']:,} held out), {counts['bad_records']:,} bad records."
        )
        for problem in store.bad_records:
            progress.print(f"  {problem}")


def _check_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    TokenStore(folder)  # raises an error if the store is incomplete
    if read_json(folder / TOKENIZER) != describe_tokenizer(tokenizer):
        raise RecipeError(
            f"{folder} was tokenized with a different tokenizer; set tokenizer.load to the tokenizer that made it."
        )


def _owner_name(recipe: Recipe, source: CorpusSource) -> str:
    """The name of the first source with the same texts, whose token folder this source shares."""
    origin = source.model_dump(exclude=USAGE_KEYS)
    return next(other.name for other in recipe.corpus.sources if other.model_dump(exclude=USAGE_KEYS) == origin)


def get_corpus(source: CorpusSource, folder: Path, held_out: float, workers: int | None = None) -> Corpus:
    """The corpus that a source names. The built-in corpus is collected into `folder`."""
    if source.files:
        return FileCorpus(tuple(source.files), source.column, source.one_per, held_out)
    if source.dataset:
        return DatasetCorpus(source.dataset, source.split, source.column, held_out)
    return docstring_corpus(folder / "docstrings.jsonl", held_out, workers)


def _named_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast | None:
    """The tokenizer that the recipe names, itself or by its checkpoint."""
    origin = recipe.tokenizer_origin
    return load_fast_tokenizer(find_checkpoint(origin)) if origin else None


def _get_tokenizer(
    recipe: Recipe,
    named: PreTrainedTokenizerFast | None,
    corpora: list[Corpus],
    folder: Path,
    progress: Progress,
) -> PreTrainedTokenizerFast:
    """The run's own copy, the tokenizer that the recipe names, or a new one."""
    if folder.is_dir():
        return load_fast_tokenizer(folder)
    tokenizer, settings = named, recipe.tokenizer
    if tokenizer is None:
        progress.print(f"Training a {settings.kind} tokenizer of {settings.vocab_size:,} entries.")
        samples = [corpus.sample(SAMPLE_BYTES // len(corpora)) for corpus in corpora]
        tokenizer = train_tokenizer(settings.kind, settings.vocab_size, itertools.chain.from_iterable(samples))
    with atomic_folder(folder) as scratch:
        save_tokenizer(tokenizer, scratch)
    return load_fast_tokenizer(folder)
