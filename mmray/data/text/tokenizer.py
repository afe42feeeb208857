"""Caption cleaning and tokenization. Tokenizers are passed between processes as the text of their
tokenizer.json.

Only `tokenizers` is imported, because transformers would slow down the start of decode actors
several times.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import BertWordPieceTokenizer, Tokenizer
from tokenizers.models import BPE

from mmray.data.rows import BadRow

if TYPE_CHECKING:
    pass

MAX_CAPTION_BYTES = 64 * 1024
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
# Unicode category Cc, which is stable, and the byte order mark
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ufeff]")
# UTF-8 that was read as Latin-1, such as `Ã\xa0`: `repair_text` of a model needs its controls
_MOJIBAKE = re.compile(r"[\xc2-\xf4][\x80-\xbf]")
_ASCII_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f\ufeff]")
_ASCII_SPACES = re.compile(r"[ \t-\r]+")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>")


def clean_caption(text: str, repair: bool = False) -> str:
    """Remove control characters from a caption and collapse runs of whitespace.

    Args:
        text: A caption as the source has it.
        repair: Apply `repair_text` first.

    Returns:
        The cleaned caption, without whitespace at its ends.

    Raises:
        BadRow: With stage `text` and reason `type` (no str), `encoding` (a lone surrogate),
            `too-long` (over 64 KiB of UTF-8) or `blank` (no visible character).
    """
    if not isinstance(text, str):
        kind = type(text).__name__
        if isinstance(text, dict):
            kind = f"an object with {', '.join(map(str, text))[:80]}"
        raise BadRow("text", "type", f"a caption must be text, not {kind}")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise BadRow("text", "encoding", f"character {error.start} is a lone surrogate") from None
    if num_bytes > MAX_CAPTION_BYTES:
        raise BadRow("text", "too-long", f"{num_bytes} bytes are over {MAX_CAPTION_BYTES}")
    if repair:
        text = repair_text(text)
    if _MOJIBAKE.search(text):
        visible = _ASCII_SPACES.sub(" ", _ASCII_CONTROLS.sub("", text)).strip(" ")
    else:
        words = " ".join(text.split())  # first: tab and newline are also control characters
        visible = " ".join(_CONTROLS.sub("", words).split())
    # invisible characters
    if all(unicodedata.category(character) in ("Cf", "Zs") for character in visible):
        raise BadRow("text", "blank", f"nothing to read in {text[:40]!r}")
    return visible


def repair_text(text: str) -> str:
    """Repair text that was decoded wrongly (package ftfy) and replace HTML entities, also doubly
    escaped ones, as OpenAI's and open_clip's tokenizers do.
    """
    if text.isascii() and "&" not in text:
        return text
    import ftfy  # takes 50 ms

    return html.unescape(html.unescape(ftfy.fix_text(text)))


def is_clip_bpe(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has CLIP's vocabulary, which was made from repaired texts."""
    return (
        isinstance(tokenizer.model, BPE)
        and tokenizer.model.end_of_word_suffix == "</w>"
        and tokenizer.token_to_id("<|startoftext|>") is not None
    )


class TextEncoder:
    """Encodes captions as token ids.

    Args:
        tokenizer_json: Content of a tokenizer.json file.
        max_tokens: Maximum number of tokens of a text, special tokens included.

    Attributes:
        pad_id: Id of the padding token; 0 if the tokenizer has none.
        vocab_size: The largest token id plus 1.
        has_start: Whether a special token precedes each text.
        end_id: Id of the special token at the end of each text, which occurs only there; None: the
            tokenizer has none.
        repairs_texts: Whether `format_caption` applies `repair_text`: for CLIP's vocabulary.
    """

    def __init__(self, tokenizer_json: str, max_tokens: int) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.max_tokens = max_tokens
        # Padded positions are masked, so any id works if the tokenizer has no pad token.
        known = (self.tokenizer.token_to_id(name) for name in _PAD_NAMES)
        declared = self.tokenizer.padding
        self.pad_id = (
            int(declared["pad_id"])
            if declared
            else next((index for index in known if index is not None), 0)
        )
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.tokenizer.no_padding()
        text = self.tokenizer.encode("a")
        special = text.special_tokens_mask
        self.has_start = 0 in special and special[0] == 1
        has_end = 0 in special and special[-1] and text.ids.count(text.ids[-1]) == 1
        self.end_id = text.ids[-1] if has_end else None
        self.tokenizer.enable_truncation(max_tokens)  # truncates the text but keeps [CLS] and [SEP]
        self.repairs_texts = is_clip_bpe(self.tokenizer)

    def format_caption(self, text: str) -> str:
        """Return a caption as this model encodes it: repaired, if the tokenizer is CLIP's."""
        return repair_text(text) if self.repairs_texts else text

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts as token ids, with the special tokens that the tokenizer adds.

        Returns:
            Token ids int32 [N, T], padded on the right with `pad_id`, and the number of tokens of
            each text, int32 [N]. T is the number of tokens of the longest text, at least 1 and at
            most `max_tokens`.
        """
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]
        num_tokens = np.array([len(row) for row in rows], dtype=np.int32)
        ids = np.full((len(rows), max(1, num_tokens.max(initial=0))), self.pad_id, dtype=np.int32)
        for target, row in zip(ids, rows, strict=True):
            target[: len(row)] = row
        return ids, num_tokens

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids up to the end token, without special tokens."""
        if self.end_id in ids:
            ids = ids[: ids.index(self.end_id)]
        return str(self.tokenizer.decode(ids))


def remove_tokens(text: str, tokens: Collection[str]) -> str:
    """Remove special tokens from untrusted text."""
    while (token := next((token for token in tokens if token in text), None)) is not None:
        text = text.replace(token, "")  # the rest may form another token
    return text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Train a lower-casing WordPiece tokenizer (BERT's normalizer); the same texts give the same
    tokenizer.

    Args:
        texts: Captions to train on.
        vocab_size: Maximum number of tokens, special tokens included. Half of it, without the
            special tokens, is the limit of the alphabet.

    Returns:
        Content of its tokenizer.json, in which `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]` and `[MASK]` are
        ids 0 to 4.
    """
    texts = list(texts)
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    counts: Counter[str] = Counter()
    # batched, because the overhead of a call exceeds the work for one text
    for start in range(0, len(texts), 1000):
        counts.update(tokenizer.normalize("\n".join(texts[start : start + 1000])))
    ranked = sorted(
        (-count, character) for character, count in counts.items() if not character.isspace()
    )
    limit = max(1, (vocab_size - len(SPECIAL_TOKENS)) // 2)
    alphabet = sorted(character for _, character in ranked[:limit])
    pieces = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet)]
    tokenizer.train_from_iterator(
        texts,
        vocab_size,
        min_frequency=0,
        limit_alphabet=0,
        special_tokens=pieces,
        show_progress=False,
    )
    return str(BertWordPieceTokenizer(tokenizer.get_vocab(), lowercase=True).to_str())


def declared_pad_id(tokenizer_json: str) -> int | None:
    """Return the id of the pad token that a tokenizer declares, or None."""
    padding = Tokenizer.from_str(tokenizer_json).padding
    return int(padding["pad_id"]) if padding else None
