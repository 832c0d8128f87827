"""Sentence embeddings."""

from bertblocks.tasks.embed.examples import EmbeddingExample
from bertblocks.tasks.embed.predictions import EmbeddingPipeline
from bertblocks.tasks.embed.task import EmbedTask

__all__ = ["EmbedTask", "EmbeddingExample", "EmbeddingPipeline"]
