"""Many short runs of one recipe, and the best of them as a recipe: the room above one run."""
