"""Prepares a recipe's corpus and tokenizer once in the run's folder, for every process to open."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.core.addresses import is_address
from bertblocks.core.settings import RecipeError
from bertblocks.core.storage import atomic_folder, read_json
from bertblocks.data.corpus import Corpus, CorpusPart, FileCorpus, dataset_corpus
from bertblocks.data.docstrings import docstring_corpus
from bertblocks.data.duplicates import DistinctCorpus, remove_duplicates
from bertblocks.data.parts import PartOrder, TokenParts, clear_parts
from bertblocks.data.prepare import DUPLICATES, describe_tokenizer, prepare
from bertblocks.data.tokens import INFO, TOKENIZER, TokenDocuments, TokenStore, cache_store
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
    """The token ids of a run: the training texts of each source, and the held-out texts.

    Of a streamed source, `train` has the first part, and `streamed` all parts.
    """

    tokenizer: PreTrainedTokenizerFast
    train: dict[str, TokenDocuments]
    held_out: list[TokenDocuments]
    streamed: dict[str, TokenParts]

    @property
    def sources(self) -> dict[str, TokenDocuments | TokenParts]:
        return {**self.train, **self.streamed}

    @property
    def counts(self) -> dict[str, int]:
        """Totals over all token stores."""
        stores = list({id(subset.store): subset.store for subset in self.train.values()}.values())
        keys = dict.fromkeys(key for store in stores for key in store.counts)
        return {key: sum(store.counts.get(key, 0) for store in stores) for key in keys}


def prepare_corpus(recipe: Recipe, world: World, progress: Progress) -> TokenizedCorpus:
    """Prepares missing texts, tokenizer and tokens in the main process, then opens them in every process."""
    folder = recipe.folder / "data"
    world.run_on_main(lambda: _prepare(recipe, folder, progress))
    tokenizer = load_fast_tokenizer(folder / "tokenizer")
    sources = recipe.corpus.sources
    streamed = {source.name: _open_parts(recipe, source, tokenizer, folder) for source in sources if source.stream}
    stores = {source.name: TokenStore(_token_folder(recipe, source, folder)) for source in sources}
    distinct = {owner_name(recipe, source): stores[source.name].held_out for source in sources}
    held_out = [subset for subset in distinct.values() if len(subset)]
    if not held_out:
        raise RecipeError("No texts are held out for evaluation; raise corpus.held_out or provide more texts.")
    return TokenizedCorpus(tokenizer, {name: store.train for name, store in stores.items()}, held_out, streamed)


def _open_parts(recipe: Recipe, source: CorpusSource, tokenizer: PreTrainedTokenizerFast, folder: Path) -> TokenParts:
    assert source.stream is not None
    settings = recipe.corpus
    corpus = get_corpus(source, folder, settings.held_out)
    target = _token_folder(recipe, source, folder)
    return TokenParts(source.name, corpus, tokenizer, target, source.stream, recipe.run.seed, settings.max_bad_share)


def _token_folder(recipe: Recipe, source: CorpusSource, folder: Path) -> Path:
    if source.tokens:
        return cache_store(source.tokens) if is_address(source.tokens) else Path(source.tokens)
    return folder / owner_name(recipe, source)


def _prepare(recipe: Recipe, folder: Path, progress: Progress) -> None:
    settings = recipe.corpus
    workers = settings.workers or None
    has_begun = bool(CheckpointFolder(recipe.folder / "checkpoints").steps())
    token_folders = [_token_folder(recipe, source, folder) for source in settings.sources]
    if has_begun and all((path / INFO).is_file() for path in token_folders):
        return  # a run keeps its tokens, even if the texts have changed since
    if not has_begun:
        for source, path in zip(settings.sources, token_folders, strict=True):
            if source.stream:
                clear_parts(path)
    is_new = not (folder / "tokenizer").is_dir()
    named = _named_tokenizer(recipe) if is_new else None  # before texts are gathered: a wrong name is found at once
    corpora: dict[str, Corpus] = {}
    for source in settings.sources:
        owner = owner_name(recipe, source)
        if owner not in corpora and not source.tokens:
            if source.builtin and not (folder / "docstrings.jsonl").is_file():
                progress.print("Collecting the docstrings of Python and the installed packages.")
            corpora[owner] = _first_texts(recipe, source, folder)
    tokenizer = _get_tokenizer(recipe, named, list(corpora.values()), folder / "tokenizer", progress)
    for source in settings.sources:
        if source.tokens:
            _check_tokens(_token_folder(recipe, source, folder), tokenizer)
    for name, corpus in corpora.items():
        store = prepare(corpus, tokenizer, folder / name, workers, settings.max_bad_share, overwrite=True)
        counts = store.counts
        part = " (first part)" if isinstance(corpus, CorpusPart) else ""
        is_distinct = isinstance(corpus, DistinctCorpus)
        removed = f", {counts.get('duplicates', 0):,} near-duplicates removed" if is_distinct else ""
        progress.print(
            f"Corpus {name}{part}: {counts['documents']:,} documents, {counts['tokens']:,} tokens ("
            f"{counts['held_out_tokens']:,} held out), {counts['bad_records']:,} bad records{removed}."
        )
        for problem in store.bad_records:
            progress.print(f"  {problem}")


def _first_texts(recipe: Recipe, source: CorpusSource, folder: Path) -> Corpus:
    """The texts of a source that are tokenized before training starts: all of them, or the first part of a stream."""
    workers = recipe.corpus.workers or None
    corpus = get_corpus(source, folder, recipe.corpus.held_out, workers)
    if source.dedup:
        return remove_duplicates(corpus, folder / f"{source.name}-{DUPLICATES}", source.dedup, workers)
    if source.stream:
        order = PartOrder(len(corpus.shards()), source.stream, recipe.run.seed)
        return CorpusPart(corpus, order.shards_of(0))
    return corpus


def _check_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    TokenStore(folder)  # raises an error if the store is incomplete
    if read_json(folder / TOKENIZER) != describe_tokenizer(tokenizer):
        raise RecipeError(
            f"{folder} was tokenized with a different tokenizer; set tokenizer.load to the tokenizer that made it."
        )


def owner_name(recipe: Recipe, source: CorpusSource) -> str:
    """The name of the first source with the same texts, whose token folder this source shares."""
    if source.stream:
        return source.name  # each streamed source advances by itself
    origin = source.model_dump(exclude=USAGE_KEYS)
    return next(other.name for other in recipe.corpus.sources if other.model_dump(exclude=USAGE_KEYS) == origin)


def get_corpus(source: CorpusSource, folder: Path, held_out: float, workers: int | None = None) -> Corpus:
    """The corpus that a source names. The built-in corpus is collected into `folder`."""
    if source.files:
        return FileCorpus(tuple(source.files), source.column, source.one_per, held_out)
    if source.dataset:
        return dataset_corpus(source.dataset, source.split, source.column, held_out, is_streamed=bool(source.stream))
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
