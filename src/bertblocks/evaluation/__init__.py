"""Evaluation: task metrics on files, GLUE, pseudo-perplexity, needle-in-a-haystack tests and MTEB."""
