"""The settings of a folder of any kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bertblocks.checkpoints.sentence_transformers.cross_encoder import read_cross_encoder
from bertblocks.checkpoints.sentence_transformers.embedder import EmbeddingSettings, read_settings
from bertblocks.checkpoints.sentence_transformers.modules import find_kind
from bertblocks.checkpoints.sentence_transformers.multi_vector import read_multi_vector
from bertblocks.checkpoints.sentence_transformers.sparse_encoder import read_sparse_encoder

#: Readers by the kind of folder; all others have the settings of embeddings.
SETTINGS_READERS: dict[str | None, Callable[[Path], EmbeddingSettings]] = {
    "cross-encoder": read_cross_encoder,
    "sparse-encoder": read_sparse_encoder,
    "multi-vector": read_multi_vector,
}


def read_settings_of_any(folder: Path) -> EmbeddingSettings:
    """Reads the settings of a folder's kind, or those of its embeddings."""
    return SETTINGS_READERS.get(find_kind(folder), read_settings)(folder)
