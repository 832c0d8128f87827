"""The same encoders in JAX: Flax nnx models with the same configs and weights, and a Mini BERT in Flax linen.

This package needs the extra `jax`; the rest of BertBlocks never imports it.
"""

import bertblocks.flax._installed  # noqa: F401
from bertblocks.flax.batches import bucket_length, pack_rows, pad_rows
from bertblocks.flax.load import from_torch, load
from bertblocks.flax.mini_bert import EncoderBlock, MiniBERT, mini_bert_forward, mini_bert_weights
from bertblocks.flax.models import (
    FlaxBertBlocksForMaskedLM,
    FlaxBertBlocksForQuestionAnswering,
    FlaxBertBlocksForSequenceClassification,
    FlaxBertBlocksForTokenClassification,
    FlaxBertBlocksModel,
    FlaxBertBlocksPreTrainedModel,
)
from bertblocks.flax.nn.gate import register_gate
from bertblocks.flax.nn.mlp import register_mlp
from bertblocks.flax.nn.norm import register_norm
from bertblocks.flax.nn.position import register_position
from bertblocks.flax.sharding import data_mesh, replicate, shard_rows

__all__ = [
    "EncoderBlock",
    "FlaxBertBlocksForMaskedLM",
    "FlaxBertBlocksForQuestionAnswering",
    "FlaxBertBlocksForSequenceClassification",
    "FlaxBertBlocksForTokenClassification",
    "FlaxBertBlocksModel",
    "FlaxBertBlocksPreTrainedModel",
    "MiniBERT",
    "bucket_length",
    "data_mesh",
    "from_torch",
    "load",
    "mini_bert_forward",
    "mini_bert_weights",
    "pack_rows",
    "pad_rows",
    "register_gate",
    "register_mlp",
    "register_norm",
    "register_position",
    "replicate",
    "shard_rows",
]
