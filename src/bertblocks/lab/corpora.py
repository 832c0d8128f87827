"""The texts of a study: each corpus is tokenized once in the study's folder, and all trials read its tokens.

Paths are relative to the study's folder, in which trials run, so that the folder can be moved and shared.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from bertblocks.core.settings import RecipeError
from bertblocks.core.storage import write_json
from bertblocks.data.tokens import TokenStore
from bertblocks.text.tokenizers import load_fast_tokenizer
from bertblocks.text.vocabulary import Vocabulary
from bertblocks.training.corpora import USAGE_KEYS, owner_name, prepare_corpus
from bertblocks.training.distributed import join
from bertblocks.training.held_out import HeldOutEvaluator
from bertblocks.training.progress import Progress
from bertblocks.training.recipe import Recipe
from bertblocks.training.sections import CorpusSource, Tokenizer
from bertblocks.training.training_plan import TrainingPlan

CORPORA, READY = "corpora", "ready.json"


def corpus_folder(recipe: Recipe) -> Path:
    """Where the tokens of a recipe are, named after all that decides them."""
    sources = [source.model_dump(exclude=USAGE_KEYS - {"name"}) for source in recipe.corpus.sources]
    return Path(CORPORA) / digest(
        [sources, recipe.corpus.held_out, recipe.tokenizer_origin, recipe.record()["tokenizer"]]
    )


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def with_shared_tokenizer(recipe: Recipe, base: Recipe) -> Recipe:
    """A recipe that changes the corpus but not the tokenizer keeps the one of the base."""
    for source in recipe.corpus.sources:
        if source.stream:
            raise RecipeError(
                f"corpus.sources: {source.name} is streamed; a study prepares its texts once: remove stream."
            )
    same = (recipe.tokenizer, recipe.tokenizer_origin) == (base.tokenizer, base.tokenizer_origin)
    if not same or corpus_folder(recipe) == corpus_folder(base):
        return recipe
    return recipe.model_copy(update={"tokenizer": Tokenizer(load=_tokenizer(base))})


def with_shared_tokens(recipe: Recipe) -> Recipe:
    """The recipe of a trial, which reads the tokens that `prepare_texts` wrote."""
    folder = corpus_folder(recipe)
    sources = [
        CorpusSource(
            name=source.name,
            tokens=source.tokens or str(folder / "data" / owner_name(recipe, source)),
            weight=source.weight,
            min_tokens=source.min_tokens,
        )
        for source in recipe.corpus.sources
    ]
    corpus = recipe.corpus.model_copy(update={"sources": sources})
    return recipe.model_copy(update={"corpus": corpus, "tokenizer": Tokenizer(load=_tokenizer(recipe))})


def _tokenizer(recipe: Recipe) -> str:
    return str(corpus_folder(recipe) / "data" / "tokenizer")


def prepare_texts(recipe: Recipe, console: Console) -> None:
    """Tokenizes the corpus of a recipe, unless that is done. It never changes afterwards, even if its files do."""
    folder = corpus_folder(recipe)
    if (folder / READY).is_file():
        return
    run = recipe.run.model_copy(update={"folder": str(folder)})
    corpus = prepare_corpus(recipe.model_copy(update={"run": run}), join("cpu"), Progress(console))
    write_json(folder / READY, corpus.counts)


def open_held_out(trial: Recipe, shared: Recipe, tokens: int) -> HeldOutEvaluator:
    """The held-out texts of `shared`, which reads shared tokens, cut to the length of the trial's last phase."""
    folders = dict.fromkeys(str(source.tokens) for source in shared.corpus.sources)
    held_out = [TokenStore(Path(folder)).held_out for folder in folders]
    tokenizer = load_fast_tokenizer(Path(str(shared.tokenizer.load)))
    length = TrainingPlan(trial).phases[-1].length
    return HeldOutEvaluator(
        [subset for subset in held_out if len(subset)], Vocabulary.from_tokenizer(tokenizer), length, tokens
    )
