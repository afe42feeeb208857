"""Hyperparameter search: short runs of one recipe."""
