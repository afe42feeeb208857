"""Metrics of embeddings and answers."""

from collections.abc import Mapping

EXAMPLES = "examples.json"  # file of a run with hits and misses of its newest evaluation
ROWS_IN_SET = "rows_in_set"  # metric of an evaluation of which `evaluate.limit` leaves out rows
# Directions of retrieval: of models of images and texts, and of text, audio and video.
DIRECTIONS = (
    "image_to_text",
    "text_to_image",
    *("text_to_audio", "audio_to_text", "text_to_video", "video_to_text"),
    *("audio_to_video", "video_to_audio"),
)
# Name, title and format of the metrics by which evaluations are compared.
MAIN_METRICS = (
    *((f"recall_at_1/{way}", f"recall@1 {way.replace('_', ' ')}", ".1%") for way in DIRECTIONS),
    ("zero_shot/top_1", "zero-shot top 1", ".1%"),
    ("choice_accuracy", "choice accuracy", ".1%"),
    ("exact_match", "exact match", ".1%"),
    ("perplexity", "perplexity", ".3f"),
    ("caption_perplexity", "caption perplexity", ".3f"),
    ("token_accuracy", "token accuracy", ".1%"),
)


def main_scores(scores: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return titles and values of the MAIN_METRICS that a set has, such as ("recall@1 image to
    text", "41.2%").
    """
    return [
        (title, format(value, style))
        for name, title, style in MAIN_METRICS
        if (value := scores.get(name)) is not None
    ]
