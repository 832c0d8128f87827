"""BertBlocks: build, bring, pretrain, fine-tune and run any BERT-like encoder from one config.

Names are imported when they are first used, so that `import bertblocks` costs nothing; models are registered with
transformers' Auto classes as soon as both are imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bertblocks._auto import register_with_transformers
from bertblocks.core.cpu import avoid_broken_amx

if TYPE_CHECKING:
    from bertblocks.backends import AttentionBackend as AttentionBackend
    from bertblocks.backends import register_backend as register_backend
    from bertblocks.blocks.activation import register_activation as register_activation
    from bertblocks.blocks.mlp import register_mlp as register_mlp
    from bertblocks.blocks.norm import register_norm as register_norm
    from bertblocks.blocks.position import register_position as register_position
    from bertblocks.checks import ConfigError as ConfigError
    from bertblocks.config import BertBlocksConfig as BertBlocksConfig
    from bertblocks.families import from_huggingface as from_huggingface
    from bertblocks.families import save_huggingface as save_huggingface
    from bertblocks.families import to_huggingface as to_huggingface
    from bertblocks.families.convert import convert as convert
    from bertblocks.families.load import load as load
    from bertblocks.inference import Predictor as Predictor
    from bertblocks.layout import SequenceLayout as SequenceLayout
    from bertblocks.models import BertBlocksForMaskedDiffusion as BertBlocksForMaskedDiffusion
    from bertblocks.models import BertBlocksForMaskedLM as BertBlocksForMaskedLM
    from bertblocks.models import BertBlocksForPreTraining as BertBlocksForPreTraining
    from bertblocks.models import BertBlocksForQuestionAnswering as BertBlocksForQuestionAnswering
    from bertblocks.models import BertBlocksForSequenceClassification as BertBlocksForSequenceClassification
    from bertblocks.models import BertBlocksForTokenClassification as BertBlocksForTokenClassification
    from bertblocks.models import BertBlocksModel as BertBlocksModel
    from bertblocks.models import BertBlocksPreTrainedModel as BertBlocksPreTrainedModel
    from bertblocks.presets import preset_names as preset_names
    from bertblocks.tasks.finetune import finetune as finetune

__version__ = "0.1.0"

_HOMES = {
    "AttentionBackend": "backends",
    "BertBlocksConfig": "config",
    "BertBlocksForMaskedDiffusion": "models",
    "BertBlocksForMaskedLM": "models",
    "BertBlocksForPreTraining": "models",
    "BertBlocksForQuestionAnswering": "models",
    "BertBlocksForSequenceClassification": "models",
    "BertBlocksForTokenClassification": "models",
    "BertBlocksModel": "models",
    "BertBlocksPreTrainedModel": "models",
    "ConfigError": "checks",
    "Predictor": "inference",
    "SequenceLayout": "layout",
    "convert": "families.convert",
    "finetune": "tasks.finetune",
    "from_huggingface": "families",
    "load": "families.load",
    "preset_names": "presets",
    "register_activation": "blocks.activation",
    "register_backend": "backends",
    "register_mlp": "blocks.mlp",
    "register_norm": "blocks.norm",
    "register_position": "blocks.position",
    "save_huggingface": "families",
    "to_huggingface": "families",
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


avoid_broken_amx()
register_with_transformers()
