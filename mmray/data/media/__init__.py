"""Audio and video: formats, decoding, subtitles, and clips that are aligned with texts."""
