"""An example of a source format: lines `photo.jpg | a caption`."""

from typing import Any

from mmray.data.formats.text_lines import JsonlSource
from mmray.data.rows import BadRow


class CaptionLines(JsonlSource):
    """A file of lines `image | caption`; its base class cuts files into chunks of lines."""

    title = "caption lines"
    suffixes = (".captions",)

    def parse(self, record: bytes) -> dict[str, Any]:
        """Return the columns of a line. Raises BadRow."""
        image, bar, text = record.decode(errors="replace").partition("|")
        if not bar:
            raise BadRow("parse", "captions", f"no `|` in {image[:40]!r}")
        return {"image": image.strip(), "text": text.strip()}
