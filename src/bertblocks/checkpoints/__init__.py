"""Reads and writes checkpoints: families, conversion, quantization, growing and merging. No other room does."""
