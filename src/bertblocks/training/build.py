"""The model and the objectives that a recipe describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bertblocks import objectives
from bertblocks.checkpoints.grow import grow
from bertblocks.checkpoints.load import load
from bertblocks.config import BertBlocksConfig
from bertblocks.core.settings import RecipeError
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.text.vocabulary import Vocabulary
from bertblocks.training.recipe import Recipe
from bertblocks.training.sections import ChangingRate, MaskedDiffusion, MaskedLM, SentenceOrder
from bertblocks.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_PRESET = "modernbert-base"
#: Keys of a config that a tokenizer decides, by its own names.
TOKEN_KEYS = {
    "pad_token_id": "pad_token_id",
    "cls_token_id": "cls_token_id",
    "bos_token_id": "cls_token_id",
    "sep_token_id": "sep_token_id",
    "eos_token_id": "sep_token_id",
    "mask_token_id": "mask_token_id",
}


def task_name(recipe: Recipe) -> str:
    """The kind of model that an objective trains."""
    objective = recipe.objective
    if isinstance(objective, MaskedLM):
        return "pretraining" if objective.sentence_order else "masked-lm"
    return "masked-diffusion" if isinstance(objective, MaskedDiffusion) else "pretraining"


def build_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> BertBlocksConfig:
    """The config of a fresh model, whose vocabulary is the tokenizer's."""
    tokens = {key: getattr(tokenizer, name) for key, name in TOKEN_KEYS.items()}
    options = {"vocab_size": len(tokenizer), **tokens, **recipe.model.config}
    return BertBlocksConfig.from_preset(recipe.model.preset or DEFAULT_PRESET, **options)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> BertBlocksPreTrainedModel:
    """A fresh model, one grown from a smaller one, or a checkpoint's; ready for the recipe's objective and lengths."""
    task = task_name(recipe)
    if recipe.model.checkpoint:
        # weights are kept in fp32 while they learn, whatever they were stored in
        model, _ = load(recipe.model.checkpoint, task=task, dtype=torch.float32)
    elif recipe.model.grow_from:
        small, _ = load(recipe.model.grow_from, task=task)
        model = grow(small, build_config(recipe, tokenizer))
    else:
        model = TASK_MODELS[task](build_config(recipe, tokenizer))
    _check(model.config, recipe, tokenizer)
    if task == "pretraining" and not isinstance(recipe.objective, MaskedLM):
        freeze_language_head(model)
    return model


def freeze_language_head(model: Any) -> None:
    """Sentence order alone trains neither the masked-LM head nor its decoder's bias."""
    own = [*([] if model.head is None else model.head.parameters()), *model.decoder.parameters()]
    shared = {id(one) for one in model.base_model.parameters()}
    for one in own:
        if id(one) not in shared:
            one.requires_grad_(False)


def _check(config: BertBlocksConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    if config.vocab_size < len(tokenizer):
        raise RecipeError(f"model.config.vocab_size is {config.vocab_size}; the tokenizer has {len(tokenizer)} tokens.")
    longest = max(phase.length for phase in TrainingPlan(recipe).phases)
    if config.max_position_embeddings < longest:
        raise RecipeError(
            f"model.config.max_position_embeddings is {config.max_position_embeddings}, and a phase has length "
            f"{longest}; raise the one or lower the other."
        )


def build_objectives(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: BertBlocksConfig
) -> list[objectives.Objective]:
    """One for each phase."""
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    return [_objective(recipe, vocabulary, phase.mask_rate, config) for phase in TrainingPlan(recipe).phases]


def _objective(
    recipe: Recipe, vocabulary: Vocabulary, rate: float | ChangingRate | None, config: BertBlocksConfig
) -> objectives.Objective:
    section = recipe.objective
    if isinstance(section, MaskedDiffusion):
        return objectives.MaskedDiffusion(vocabulary, config.diffusion_min_time)
    has_types = config.type_vocab_size >= 2
    if isinstance(section, SentenceOrder) or rate is None:
        return objectives.SentenceOrder(vocabulary, token_types=has_types)
    masking = objectives.MaskedLanguageModeling(
        vocabulary,
        objectives.RateSchedule(rate.start, rate.end, rate.kind) if isinstance(rate, ChangingRate) else rate,
        section.mask_share,
        section.random_share,
        section.whole_word,
        section.spans,
    )
    return objectives.SentenceOrder(vocabulary, masking, has_types) if section.sentence_order else masking
