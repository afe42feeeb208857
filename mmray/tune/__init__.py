"""Hyperparameter search: many short runs of one recipe, the best one as a recipe file."""
