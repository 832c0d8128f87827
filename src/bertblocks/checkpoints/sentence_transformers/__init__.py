"""The formats of sentence-transformers: a checkpoint folder with files that say how its outputs become results."""

from bertblocks.checkpoints.sentence_transformers.embedder import (
    POOLINGS,
    EmbeddingSettings,
    read_settings,
    save_embedder,
    write_settings,
)
from bertblocks.checkpoints.sentence_transformers.modules import MODULES, find_kind

__all__ = [
    "MODULES",
    "POOLINGS",
    "EmbeddingSettings",
    "find_kind",
    "read_settings",
    "save_embedder",
    "write_settings",
]
