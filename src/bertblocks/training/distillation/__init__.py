"""Distillation: a student learns what a teacher computes."""
