"""Tasks, one folder each: examples, features, predictions and metrics. `Predictor` applies a model to any of them.

This package imports nothing itself, so that reading a task's settings does not load torch.
"""
