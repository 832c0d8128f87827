"""The checkpoint families that BertBlocks reads and writes, one constant each."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from bertblocks.checkpoints.families.albert import ALBERT
from bertblocks.checkpoints.families.bert import BERT
from bertblocks.checkpoints.families.bert_generation import BERT_GENERATION
from bertblocks.checkpoints.families.clip import CLIP_TEXT
from bertblocks.checkpoints.families.convbert import CONVBERT
from bertblocks.checkpoints.families.deberta import DEBERTA, DEBERTA_V2
from bertblocks.checkpoints.families.distilbert import DISTILBERT
from bertblocks.checkpoints.families.electra import ELECTRA
from bertblocks.checkpoints.families.ernie import ERNIE
from bertblocks.checkpoints.families.esm import ESM
from bertblocks.checkpoints.families.esmc import ESMC
from bertblocks.checkpoints.families.eurobert import EUROBERT, ULTRABERT
from bertblocks.checkpoints.families.family import Family
from bertblocks.checkpoints.families.gemma3 import GEMMA3
from bertblocks.checkpoints.families.ibert import IBERT
from bertblocks.checkpoints.families.jina import JINA_V3
from bertblocks.checkpoints.families.llama import LLAMA, MISTRAL, QWEN3
from bertblocks.checkpoints.families.megatron_bert import MEGATRON_BERT
from bertblocks.checkpoints.families.modernbert import MODERNBERT, MODERNBERT_DECODER
from bertblocks.checkpoints.families.mosaic_bert import JINA_BERT, MOSAIC_BERT
from bertblocks.checkpoints.families.mpnet import MPNET
from bertblocks.checkpoints.families.neobert import NEOBERT
from bertblocks.checkpoints.families.new import NEW
from bertblocks.checkpoints.families.nomic_bert import GTE, NOMIC_BERT
from bertblocks.checkpoints.families.rejected import why_not
from bertblocks.checkpoints.families.rembert import REMBERT
from bertblocks.checkpoints.families.roberta import (
    CAMEMBERT,
    DATA2VEC_TEXT,
    ROBERTA,
    ROBERTA_PRELAYERNORM,
    XLM_ROBERTA,
    XLM_ROBERTA_XL,
)
from bertblocks.checkpoints.families.roformer import ROFORMER
from bertblocks.checkpoints.families.splinter import SPLINTER
from bertblocks.checkpoints.families.t5 import MT5, T5, UMT5
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError
from bertblocks.core.registry import nearest

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        BERT,
        MODERNBERT,
        ROBERTA,
        XLM_ROBERTA,
        CAMEMBERT,
        ROBERTA_PRELAYERNORM,
        MEGATRON_BERT,
        MPNET,
        ESM,
        EUROBERT,
        ULTRABERT,
        NOMIC_BERT,
        GTE,
        NEOBERT,
        DISTILBERT,
        ELECTRA,
        CONVBERT,
        ALBERT,
        DEBERTA,
        DEBERTA_V2,
        ERNIE,
        DATA2VEC_TEXT,
        XLM_ROBERTA_XL,
        IBERT,
        BERT_GENERATION,
        ROFORMER,
        NEW,
        JINA_V3,
        JINA_BERT,
        MOSAIC_BERT,
        LLAMA,
        MISTRAL,
        QWEN3,
        MODERNBERT_DECODER,
        CLIP_TEXT,
        T5,
        MT5,
        UMT5,
        GEMMA3,
        SPLINTER,
        REMBERT,
        ESMC,
    )
}


def read_config(values: dict[str, Any] | PreTrainedConfig) -> BertBlocksConfig:
    """The architecture of a transformers config, or of a config.json with BertBlocks' own keys or a family's."""
    if isinstance(values, PreTrainedConfig):
        return family_of_config(values).read_config(values)
    name = values.get("model_type", BertBlocksConfig.model_type)
    if name == BertBlocksConfig.model_type:
        return BertBlocksConfig.from_dict(values)
    family = find_family(values)
    return family.read_config(family.parse_config(values))


def family_of_config(config: PreTrainedConfig) -> Family:
    return find_family(config.to_dict())


def find_family(values: dict[str, Any]) -> Family:
    """The family of a config.json. Some families have the `model_type` of another, and keys of their own."""
    named = (family for family in FAMILIES.values() if family.matches is not None and family.matches(values))
    return next(named, None) or get_family(values.get("model_type", "none"))


def get_family(name: Any) -> Family:
    if not isinstance(name, str) or name not in FAMILIES:
        if (reason := why_not(str(name))) is not None:
            raise ConfigError(f"model_type is {name!r}. {reason}")
        hint = nearest(name, FAMILIES) if isinstance(name, str) else ""
        raise ConfigError(f"model_type is {name!r}{hint}; BertBlocks reads the families {', '.join(FAMILIES)}.")
    return FAMILIES[name]
