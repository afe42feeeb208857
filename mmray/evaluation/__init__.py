"""Metrics of embeddings and answers."""

EXAMPLES = "examples.json"  # in the folder of a run: hits and misses of its newest evaluation
DIRECTIONS = ("image_to_text", "text_to_image")
