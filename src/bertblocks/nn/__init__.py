"""Tensors only: batch layouts, the building blocks of an encoder, attention backends, and fused operations."""
