"""Reranking: scores of a query and each of its documents."""

from bertblocks.tasks.rerank.predictions import Ranked, RerankPipeline

__all__ = ["Ranked", "RerankPipeline"]
