"""Builds the model and the objectives that a recipe describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bertblocks.checkpoints.families import read_config
from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.checkpoints.grow import grow
from bertblocks.checkpoints.load import load
from bertblocks.config import BertBlocksConfig
from bertblocks.core.settings import RecipeError
from bertblocks.core.storage import read_json
from bertblocks.data.hashing import combine
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.objectives import Objective
from bertblocks.text.vocabulary import Vocabulary
from bertblocks.training.recipe import Recipe
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


def build_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> BertBlocksConfig:
    """The config of a new model. The tokenizer sets the vocabulary size and the special tokens."""
    tokens = {key: getattr(tokenizer, name) for key, name in TOKEN_KEYS.items()}
    options = {"vocab_size": len(tokenizer), **tokens, **recipe.model.config}
    return BertBlocksConfig.from_preset(recipe.model.preset or DEFAULT_PRESET, **options)


def expected_config(recipe: Recipe) -> BertBlocksConfig:
    """The config of a recipe's model, without its tokenizer, which may not exist yet: its ids are placeholders."""
    if recipe.model.checkpoint:
        return read_config(read_json(find_checkpoint(recipe.model.checkpoint) / "config.json"))
    ids = {name: index for index, name in enumerate(dict.fromkeys(TOKEN_KEYS.values()))}
    tokens = {key: ids[name] for key, name in TOKEN_KEYS.items()}
    trained = {"vocab_size": recipe.tokenizer.vocab_size} if recipe.tokenizer.load is None else {}
    options = {**trained, **tokens, **recipe.model.config}
    return BertBlocksConfig.from_preset(recipe.model.preset or DEFAULT_PRESET, **options)


def check_model(plan: TrainingPlan) -> None:
    """Rejects a model that contradicts itself or its phases, before any text is read."""
    config = expected_config(plan.recipe)
    _check_length(config, plan)
    plan.recipe.optimizer.check_parametrization(config.parametrization)


def build_model(plan: TrainingPlan, tokenizer: PreTrainedTokenizerBase) -> BertBlocksPreTrainedModel:
    """The model to train: new, grown from a smaller one, or loaded from a checkpoint."""
    recipe = plan.recipe
    task = recipe.objective.model_task
    if recipe.model.checkpoint:
        # training keeps fp32 weights, whatever dtype the checkpoint has
        model, _ = load(recipe.model.checkpoint, task=task, dtype=torch.float32)
    elif recipe.model.grow_from:
        small, _ = load(recipe.model.grow_from, task=task)
        model = grow(small, build_config(recipe, tokenizer))
    else:
        model = init_by_name(TASK_MODELS[task](build_config(recipe, tokenizer)), recipe.run.seed)
    if model.config.vocab_size < len(tokenizer):
        raise RecipeError(
            f"model.config.vocab_size is {model.config.vocab_size}; the tokenizer has {len(tokenizer)} tokens."
        )
    _check_length(model.config, plan)
    recipe.optimizer.check_parametrization(model.config.parametrization)
    return recipe.objective.prepare_model(model)


@torch.no_grad()
def init_by_name(model: BertBlocksPreTrainedModel, seed: int) -> BertBlocksPreTrainedModel:
    """Draws the weights of each module from a seed of its own, which depends on `seed` and the module's name.

    So models that differ in some modules start with the same weights in all others, and runs with the same seed can be
    compared in pairs.
    """
    drawn: list[torch.nn.Parameter] = []
    for name, module in model.named_modules():
        torch.manual_seed(int(combine("init", seed, name)[0]))
        model._init_weights(module)  # unlike init_module, it knows the decoder
        for weight in module.parameters(recurse=False):
            weight._is_hf_initialized = True  # type: ignore[attr-defined]  # a tied weight is drawn once
            drawn.append(weight)
    for weight in drawn:
        if hasattr(weight, "_is_hf_initialized"):
            del weight._is_hf_initialized
    torch.manual_seed(seed)
    return model


def _check_length(config: BertBlocksConfig, plan: TrainingPlan) -> None:
    longest = max(phase.length for phase in plan.phases)
    if config.max_position_embeddings < longest:
        raise RecipeError(
            f"model.config.max_position_embeddings is {config.max_position_embeddings}, but a phase has length "
            f"{longest}; raise max_position_embeddings or lower the length."
        )


def build_objectives(
    plan: TrainingPlan, tokenizer: PreTrainedTokenizerBase, config: BertBlocksConfig
) -> list[Objective]:
    """One objective per phase."""
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    return [phase.objective.build(vocabulary, config) for phase in plan.phases]
