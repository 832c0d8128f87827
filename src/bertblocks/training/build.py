"""Builds the model and the objectives that a recipe describes."""

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
from bertblocks.training.sections import MaskedDiffusion, MaskedLM, MaskRateSchedule, SentenceOrder
from bertblocks.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_PRESET = "modernbert-base"
#: Config keys that the tokenizer determines, with the tokenizer's attribute for each.
TOKEN_KEYS = {
    "pad_token_id": "pad_token_id",
    "cls_token_id": "cls_token_id",
    "bos_token_id": "cls_token_id",
    "sep_token_id": "sep_token_id",
    "eos_token_id": "sep_token_id",
    "mask_token_id": "mask_token_id",
}


def model_task_of(recipe: Recipe) -> str:
    """The task model that the recipe's objective trains, as a key of `TASK_MODELS`."""
    objective = recipe.objective
    if isinstance(objective, MaskedLM):
        return "pretraining" if objective.sentence_order else "masked-lm"
    return "masked-diffusion" if isinstance(objective, MaskedDiffusion) else "pretraining"


def build_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> BertBlocksConfig:
    """The config of a new model. The tokenizer sets the vocabulary size and the special tokens."""
    tokens = {key: getattr(tokenizer, name) for key, name in TOKEN_KEYS.items()}
    options = {"vocab_size": len(tokenizer), **tokens, **recipe.model.config}
    return BertBlocksConfig.from_preset(recipe.model.preset or DEFAULT_PRESET, **options)


def build_model(plan: TrainingPlan, tokenizer: PreTrainedTokenizerBase) -> BertBlocksPreTrainedModel:
    """The model to train: new, grown from a smaller one, or loaded from a checkpoint."""
    recipe = plan.recipe
    task = model_task_of(recipe)
    if recipe.model.checkpoint:
        # training keeps fp32 weights, whatever dtype the checkpoint has
        model, _ = load(recipe.model.checkpoint, task=task, dtype=torch.float32)
    elif recipe.model.grow_from:
        small, _ = load(recipe.model.grow_from, task=task)
        model = grow(small, build_config(recipe, tokenizer))
    else:
        model = TASK_MODELS[task](build_config(recipe, tokenizer))
    _check_sizes(model.config, plan, tokenizer)
    if task == "pretraining" and not isinstance(recipe.objective, MaskedLM):
        freeze_language_head(model)
    return model


def freeze_language_head(model: Any) -> None:
    """Freezes the masked-LM head and the decoder's bias, which sentence order alone does not train."""
    head = [*([] if model.head is None else model.head.parameters()), *model.decoder.parameters()]
    shared = {id(parameter) for parameter in model.base_model.parameters()}
    for parameter in head:
        if id(parameter) not in shared:
            parameter.requires_grad_(False)


def _check_sizes(config: BertBlocksConfig, plan: TrainingPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    if config.vocab_size < len(tokenizer):
        raise RecipeError(f"model.config.vocab_size is {config.vocab_size}; the tokenizer has {len(tokenizer)} tokens.")
    longest = max(phase.length for phase in plan.phases)
    if config.max_position_embeddings < longest:
        raise RecipeError(
            f"model.config.max_position_embeddings is {config.max_position_embeddings}, but a phase has length "
            f"{longest}; raise max_position_embeddings or lower the length."
        )


def build_objectives(
    plan: TrainingPlan, tokenizer: PreTrainedTokenizerBase, config: BertBlocksConfig
) -> list[objectives.Objective]:
    """One objective per phase."""
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    return [_build_objective(plan.recipe, vocabulary, phase.mask_rate, config) for phase in plan.phases]


def _build_objective(
    recipe: Recipe, vocabulary: Vocabulary, rate: float | MaskRateSchedule | None, config: BertBlocksConfig
) -> objectives.Objective:
    section = recipe.objective
    if isinstance(section, MaskedDiffusion):
        return objectives.MaskedDiffusion(vocabulary, config.diffusion_min_time)
    has_types = config.type_vocab_size >= 2
    if isinstance(section, SentenceOrder) or rate is None:
        return objectives.SentenceOrder(vocabulary, token_types=has_types)
    masking = objectives.MaskedLanguageModeling(
        vocabulary,
        objectives.RateSchedule(rate.start, rate.end, rate.kind) if isinstance(rate, MaskRateSchedule) else rate,
        section.mask_share,
        section.random_share,
        section.whole_word,
        section.spans,
    )
    return objectives.SentenceOrder(vocabulary, masking, has_types) if section.sentence_order else masking
