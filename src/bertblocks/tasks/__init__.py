"""Fine-tuning and evaluation: data as people have it, made into what a model reads, and back into answers."""
