"""Sparse encoders (SPLADE): texts as weighted tokens of the vocabulary."""

from bertblocks.tasks.sparse.vectors import SparseVector

__all__ = ["SparseVector"]
