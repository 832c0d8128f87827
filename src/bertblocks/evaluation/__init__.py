"""How good a model is: task metrics on files, GLUE, pseudo-perplexity, needles in long texts, MTEB."""
