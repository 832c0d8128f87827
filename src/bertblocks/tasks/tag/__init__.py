"""Tagging: named entities, parts of speech, and other labels of words."""
