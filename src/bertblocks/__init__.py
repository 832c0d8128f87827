"""BertBlocks: build, bring, pretrain, fine-tune and run any BERT-like encoder from one config.

Names are imported when they are first used, so that `import bertblocks` costs nothing; models are registered with
transformers' Auto classes as soon as both are imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bertblocks._auto import register_with_transformers
from bertblocks.core.cpu import configure_onednn

if TYPE_CHECKING:
    from bertblocks.checkpoints.convert import convert as convert
    from bertblocks.checkpoints.huggingface import from_huggingface as from_huggingface
    from bertblocks.checkpoints.load import load as load
    from bertblocks.checkpoints.save import save_huggingface as save_huggingface
    from bertblocks.checkpoints.save import to_huggingface as to_huggingface
    from bertblocks.config.config import BertBlocksConfig as BertBlocksConfig
    from bertblocks.config.presets import preset_names as preset_names
    from bertblocks.config.validation import ConfigError as ConfigError
    from bertblocks.core.keys import Key as Key
    from bertblocks.models import BertBlocksForMaskedDiffusion as BertBlocksForMaskedDiffusion
    from bertblocks.models import BertBlocksForMaskedLM as BertBlocksForMaskedLM
    from bertblocks.models import BertBlocksForPreTraining as BertBlocksForPreTraining
    from bertblocks.models import BertBlocksForQuestionAnswering as BertBlocksForQuestionAnswering
    from bertblocks.models import BertBlocksForReplacedTokenDetection as BertBlocksForReplacedTokenDetection
    from bertblocks.models import BertBlocksForSequenceClassification as BertBlocksForSequenceClassification
    from bertblocks.models import BertBlocksForTokenClassification as BertBlocksForTokenClassification
    from bertblocks.models import BertBlocksModel as BertBlocksModel
    from bertblocks.models import BertBlocksPreTrainedModel as BertBlocksPreTrainedModel
    from bertblocks.nn.activation import register_activation as register_activation
    from bertblocks.nn.attention import register_attention_fn as register_attention_fn
    from bertblocks.nn.backends import AttentionBackend as AttentionBackend
    from bertblocks.nn.backends import register_backend as register_backend
    from bertblocks.nn.block import register_residual as register_residual
    from bertblocks.nn.gate import register_gate as register_gate
    from bertblocks.nn.initialization import register_initialization as register_initialization
    from bertblocks.nn.layout import SequenceLayout as SequenceLayout
    from bertblocks.nn.mlp import register_mlp as register_mlp
    from bertblocks.nn.norm import register_norm as register_norm
    from bertblocks.nn.position import register_position as register_position
    from bertblocks.nn.sharing import register_sharing as register_sharing
    from bertblocks.objectives.maskings import register_masking as register_masking
    from bertblocks.search.documents import Hit as Hit
    from bertblocks.search.index import SearchIndex as SearchIndex
    from bertblocks.search.mining_run import mine as mine
    from bertblocks.tasks.answer.predictions import Answer as Answer
    from bertblocks.tasks.answer.predictions import Answers as Answers
    from bertblocks.tasks.classify.predictions import Classification as Classification
    from bertblocks.tasks.fill_mask import Filling as Filling
    from bertblocks.tasks.predictor import Predictor as Predictor
    from bertblocks.tasks.sparse.vectors import SparseVector as SparseVector
    from bertblocks.tasks.tag.predictions import Tagged as Tagged
    from bertblocks.training.distillation.distill import distill as distill
    from bertblocks.training.finetune import finetune as finetune
    from bertblocks.training.objective_sections import register_objective as register_objective
    from bertblocks.training.optimizer_sections import register_optimizer as register_optimizer
    from bertblocks.training.pretrain import pretrain as pretrain
    from bertblocks.training.recipe import read_recipe as read_recipe
    from bertblocks.training.schedules import register_schedule as register_schedule

__version__ = "0.1.0"

_HOMES = {
    "Answer": "tasks.answer.predictions",
    "Answers": "tasks.answer.predictions",
    "AttentionBackend": "nn.backends",
    "BertBlocksConfig": "config",
    "BertBlocksForMaskedDiffusion": "models",
    "BertBlocksForMaskedLM": "models",
    "BertBlocksForPreTraining": "models",
    "BertBlocksForQuestionAnswering": "models",
    "BertBlocksForReplacedTokenDetection": "models",
    "BertBlocksForSequenceClassification": "models",
    "BertBlocksForTokenClassification": "models",
    "BertBlocksModel": "models",
    "BertBlocksPreTrainedModel": "models",
    "Classification": "tasks.classify.predictions",
    "ConfigError": "config",
    "Filling": "tasks.fill_mask",
    "Hit": "search.documents",
    "Key": "core.keys",
    "Predictor": "tasks.predictor",
    "SearchIndex": "search.index",
    "SequenceLayout": "nn.layout",
    "SparseVector": "tasks.sparse.vectors",
    "Tagged": "tasks.tag.predictions",
    "convert": "checkpoints.convert",
    "distill": "training.distillation.distill",
    "finetune": "training.finetune",
    "from_huggingface": "checkpoints.huggingface",
    "load": "checkpoints.load",
    "mine": "search.mining_run",
    "preset_names": "config",
    "pretrain": "training.pretrain",
    "read_recipe": "training.recipe",
    "register_activation": "nn.activation",
    "register_attention_fn": "nn.attention",
    "register_backend": "nn.backends",
    "register_initialization": "nn.initialization",
    "register_masking": "objectives.maskings",
    "register_gate": "nn.gate",
    "register_mlp": "nn.mlp",
    "register_norm": "nn.norm",
    "register_objective": "training.objective_sections",
    "register_optimizer": "training.optimizer_sections",
    "register_position": "nn.position",
    "register_residual": "nn.block",
    "register_schedule": "training.schedules",
    "register_sharing": "nn.sharing",
    "save_huggingface": "checkpoints.save",
    "to_huggingface": "checkpoints.save",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "flax":  # needs the extra `jax`, so nothing imports it unasked
        return importlib.import_module("bertblocks.flax")
    if name not in _HOMES:
        raise AttributeError(f"module 'bertblocks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"bertblocks.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


configure_onednn()
register_with_transformers()
