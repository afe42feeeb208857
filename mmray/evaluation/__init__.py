"""Metrics of embeddings and answers."""

EXAMPLES = "examples.json"  # in the folder of a run: hits and misses of its newest evaluation
# Directions of retrieval: of models of images and texts, and of text, audio and video.
DIRECTIONS = (
    "image_to_text",
    "text_to_image",
    *("text_to_audio", "audio_to_text", "text_to_video", "video_to_text"),
    *("audio_to_video", "video_to_audio"),
)
