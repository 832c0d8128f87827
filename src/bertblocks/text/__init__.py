"""Texts, tokenizers, and the one reader of data files. This package does not import torch."""
