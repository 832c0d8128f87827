"""Evaluation: task metrics on files, benchmarks, pseudo-perplexity, needle-in-a-haystack tests, BEIR and MTEB."""
