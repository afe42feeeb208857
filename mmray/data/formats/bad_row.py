"""What a reader raises for a row that cannot be used."""

from __future__ import annotations


class BadRow(ValueError):
    """A row that goes to quarantine: at which stage, for which reason (a short word), and a sentence."""

    def __init__(self, stage: str, reason: str, detail: str, key: str | None = None) -> None:
        super().__init__(f"{stage} {reason}: {detail}")
        self.stage, self.reason, self.detail, self.key = stage, reason, detail, key
