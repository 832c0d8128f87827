"""Tensors only: the layout of a batch, the blocks of an encoder, attention backends, and fused operations."""
