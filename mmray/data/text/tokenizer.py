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
from tokenizers import AddedToken, BertWordPieceTokenizer, Tokenizer

from mmray.data.rows import BadRow
from mmray.errors import UsageError

if TYPE_CHECKING:
    from mmray.config import Inputs
    from mmray.data.store.stored_row import Row

MAX_CAPTION_BYTES = 64 * 1024
MAX_LANGUAGES = 1000  # a column with more values is not a language column
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
# Unicode category Cc, which is stable, and the byte order mark
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ufeff]")
# UTF-8 that was read as Latin-1, such as `Ã\xa0`: `repair_text` of a model needs its controls
_MOJIBAKE = re.compile(r"[\xc2-\xf4][\x80-\xbf]")
_ASCII_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f\ufeff]")
_ASCII_SPACES = re.compile(r"[ \t-\r]+")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>")
RESERVED_TOKENS = {*SPECIAL_TOKENS, *_PAD_NAMES, "<s>", "<unk>", "<mask>", "<|startoftext|>"}


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
        getattr(tokenizer.model, "end_of_word_suffix", None) == "</w>"
        and tokenizer.token_to_id("<|startoftext|>") is not None
    )


def build_encoder(tokenizer_json: str, inputs: Inputs) -> TextEncoder:
    """Build the encoder that converts captions to token ids for a model."""
    return TextEncoder(tokenizer_json, inputs.max_tokens, inputs.language_token)


class TextEncoder:
    """Encodes captions as token ids, each with the token of its language before it, if the model
    has such tokens (`model.inputs.language_token`).

    `format_caption` and `format_texts` return texts such as `[de]ein Hund`, which `encode` takes.

    Args:
        tokenizer_json: Content of a tokenizer.json file.
        max_tokens: Maximum number of tokens of a text, special tokens included.
        language_token: Pattern of the special tokens that are languages, such as `[{}]`; `{}` is
            the language. Empty: no languages.

    Attributes:
        pad_id: Id of the padding token; 0 if the tokenizer has none.
        vocab_size: The largest token id plus 1.
        special_tokens: All special tokens as text, such as `[CLS]`.
        repairs_texts: Whether `format_caption` applies `repair_text`: for CLIP's vocabulary.
        languages: Sorted names of the languages that have a token, such as `de`.
    """

    def __init__(self, tokenizer_json: str, max_tokens: int, language_token: str = "") -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
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
        self.tokenizer.enable_truncation(max_tokens)  # truncates the text but keeps [CLS] and [SEP]
        added: dict[int, AddedToken] = self.tokenizer.get_added_tokens_decoder()
        self.special_tokens = [token.content for token in added.values() if token.special]
        self.repairs_texts = is_clip_bpe(self.tokenizer)
        pattern = re.compile(re.escape(language_token).replace(r"\{\}", "(.+)"))
        self._language_tokens: dict[str, str] = {}
        for token in self.special_tokens:
            match = pattern.fullmatch(token)
            if match is not None and token not in RESERVED_TOKENS:
                self._language_tokens[match[1]] = token
        self.languages = tuple(sorted(self._language_tokens))

    def format_texts(self, row: Row) -> list[str]:
        """Return the captions of a stored row as `format_caption` does.

        A row whose language is missing or has no token gets none.
        """
        language = row.language if row.language in self._language_tokens else None
        return [self.format_caption(text, language) for text in row.texts]

    def format_caption(self, text: str, language: str | None = None) -> str:
        """Return a caption as this model encodes it: repaired, if the tokenizer is CLIP's, and with
        the token of its language.

        Raises:
            UsageError: The language has no token.
        """
        if language is not None and language not in self._language_tokens:
            reason = "it was trained without model.inputs.language_token"
            if self.languages:
                reason = f"its language tokens are {', '.join(self.languages)}"
            raise UsageError(f"the model has no token for language {language!r}; {reason}")
        if self.repairs_texts:
            text = repair_text(text)
        token = self._language_tokens.get(language or "", "")
        return token + remove_tokens(text, self._language_tokens.values())

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


def remove_tokens(text: str, tokens: Collection[str]) -> str:
    """Remove special tokens from untrusted text."""
    while (token := next((token for token in tokens if token in text), None)) is not None:
        text = text.replace(token, "")  # the rest may form another token
    return text


def add_language_tokens(tokenizer_json: str, pattern: str, languages: Iterable[str]) -> str:
    """Add a special token for each language to a tokenizer; one that exists keeps its id.

    Args:
        pattern: Form of a token with `{}` for the language: `[{}]` gives `[de]`.
        languages: Languages of the rows of the training set; added in sorted order.

    Returns:
        Content of the extended tokenizer.json.

    Raises:
        UsageError: There is no language, or there are more than MAX_LANGUAGES (1000).
    """
    tokens = [pattern.replace("{}", language) for language in sorted(languages)]
    if not tokens:
        raise UsageError(
            f"model.inputs.language_token is {pattern!r}, but no row of the training set has a "
            "`language`: prepare it with that column, or leave the setting empty"
        )
    if len(tokens) > MAX_LANGUAGES:
        raise UsageError(
            f"model.inputs.language_token: the training set has {len(tokens):,} languages, the "
            f"first {tokens[0]!r}; a column of languages has at most {MAX_LANGUAGES:,}: leave the "
            "setting empty, or fix the source"
        )
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens]
    )
    return str(tokenizer.to_str())


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
