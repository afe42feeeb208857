"""Rows of vision-language models of transformers: encoding with the model's own processor."""
