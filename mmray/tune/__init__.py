"""Hyperparameter search: short runs of one recipe; the best one is written as a recipe file."""
