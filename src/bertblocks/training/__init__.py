"""From a recipe to a trained model: recipes, the loop, optimizers, schedules, checkpoints."""
