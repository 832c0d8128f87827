"""Texts and tokenizers, without torch."""
