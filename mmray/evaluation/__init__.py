"""Metrics of embeddings and answers."""
