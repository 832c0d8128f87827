"""Pretraining and fine-tuning: recipes, the training loop, optimizers, schedules and run folders."""
