"""Texts, tokenizers and tables, without torch."""
