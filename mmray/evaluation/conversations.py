"""Evaluation of vision-language models on held-out conversations: loss, perplexity and token
accuracy of the assistant's turns, and the scores of generated answers.

An answer is generated for the last turn of a conversation, after the turns before it. A row that
only has captions has all of them as reference answers to the same question.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mmray.data.images.decode import BadImage
from mmray.data.messages import conversations_of, message_text
from mmray.data.store.prepared_set import PreparedSet, Row, read_each
from mmray.data.vlm.encoder import EncodedRow, RowError
from mmray.data.vlm.reader import ConversationReader
from mmray.errors import DataError
from mmray.evaluation.answers import anls, exact_match, vqa_accuracy
from mmray.evaluation.evaluator import Group, eval_mode
from mmray.evaluation.generation import caption_scores, gather_sorted

if TYPE_CHECKING:
    from mmray.config import Config

MAX_NEW_TOKENS = 64  # of an answer
READ_ROWS = 64  # rows of a set read at once


class HeldOutRow(NamedTuple):
    """A held-out row and its index in the set.

    Attributes:
        number: Index of the row in the set.
        row: The stored row.
    """

    number: int
    row: Row


class ConversationEvaluator:
    """Computes loss, perplexity and the scores of generated answers of a vision-language model.

    Args:
        config: The config of the run.
        prepared: The set with the held-out rows.
        max_pixels: Images with more pixels are not decoded.
        on_rows: Called with the number of rows of each batch when it is done, to show progress.
    """

    def __init__(
        self,
        config: Config,
        prepared: PreparedSet,
        max_pixels: int,
        on_rows: Callable[[int], None] | None = None,
    ) -> None:
        spec: Any = config.model
        self.settings = config.evaluate
        self.prepared = prepared
        self.reader = ConversationReader(prepared, spec, max_pixels)
        self.on_rows = on_rows or (lambda _: None)
        self.skipped: list[str] = []

    @torch.no_grad()
    def score(
        self,
        model: nn.Module,
        group: Group,
        objective: Any,
        global_rows: int,
        save_examples: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, float]:
        """Return the metrics of a vision-language model on held-out conversations.

        A collective call of all ranks, each of which reads its part of the rows.

        Args:
            model: The model without DDP, of the class `Vlm` in mmray.models.
            group: The ranks.
            objective: Unused; the loss is the cross-entropy of the assistant's tokens.
            global_rows: Unused.
            save_examples: Unused.

        Returns:
            Equal on all ranks: `loss` (mean over the assistant's tokens), `perplexity`,
            `token_accuracy` (0 to 1), `tokens`, `rows` and `bad_rows` (counts). With
            `evaluate.num_generations` also `exact_match`, `vqa_accuracy`, `anls`, `bleu_4` (0 to
            1), `cider` (0 to 10) and `answered` (rows with a generated answer).

        Raises:
            DataError: No row is readable; raised on every rank.
        """
        vlm: Any = model
        collate = vlm.collator()
        self.reader.__dict__["encoder"] = vlm.encoder  # otherwise the processor is loaded twice
        self.skipped.clear()
        sums = torch.zeros(5, dtype=torch.float64)  # loss, tokens, correct tokens, rows, bad rows
        with eval_mode(model):
            for part in self._batches(group, self.settings.limit):
                encoded: list[EncodedRow] = []
                for held_out in part:
                    row = self._try(held_out, self._encode)
                    encoded += row or []
                    sums[3] += row is not None
                if encoded:
                    batch = collate(encoded)
                    outputs = model({name: each.to(group.device) for name, each in batch.items()})
                    sums[0] += outputs["loss_sum"].double().cpu()
                    sums[1] += len(batch["targets"])
                    sums[2] += outputs["num_correct"].double().cpu()
                self.on_rows(len(part))
        sums[4] = len(self.skipped)
        loss, tokens, correct, rows, bad_rows = (
            group.all_gather_variable(sums[None]).sum(0).tolist()
        )
        if not rows:
            raise DataError(
                f"cannot read any of {bad_rows:.0f} evaluation rows: {'; '.join(self.skipped[:1])}"
            )
        answers: dict[str, float] = {}
        if self.settings.num_generations:
            with eval_mode(model):
                answers = self._answer_scores(vlm, group)
        mean = loss / max(1.0, tokens)
        return answers | {
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),  # exp of more is infinite
            "token_accuracy": correct / max(1.0, tokens),
            "tokens": tokens,
            "rows": rows,
            "bad_rows": bad_rows,
        }

    def _batches(self, group: Group, limit: int | None) -> Iterator[list[HeldOutRow]]:
        """Yield the readable rows of each batch of this rank's part of the first `limit` rows."""
        num_rows = min(self.prepared.num_rows, limit or self.prepared.num_rows)
        numbers = np.array_split(np.arange(num_rows), group.world_size)[group.rank]
        size = min(READ_ROWS, self.settings.batch)
        for first in range(0, len(numbers), size):
            part = numbers[first : first + size]
            rows = []
            records = read_each(self.prepared, part)
            for number, record in zip(part.tolist(), records, strict=True):
                if isinstance(record, Exception):
                    self._skip(number, record)
                elif not record.checksum_ok:
                    self._skip(number, ValueError("image digest does not match the prepared set"))
                else:
                    rows.append(HeldOutRow(number, record))
            yield rows

    def _encode(self, row: Row) -> list[EncodedRow]:
        """Return the conversations of a row: one, or one for each caption. Raises as
        `encode_row`.
        """
        num_conversations = 1 if row.messages else len(row.texts)
        return [self.reader.encode_row(row, choice) for choice in range(num_conversations)]

    def _try(self, held_out: HeldOutRow, compute: Callable[[Row], Any]) -> Any:
        """Return the result, or None for a row that the model cannot read."""
        try:
            return compute(held_out.row)
        except (BadImage, RowError) as error:
            self._skip(held_out.number, error)
            return None

    def _skip(self, number: int, error: Exception) -> None:
        self.skipped.append(f"row {number}: {error}")
        if len(self.skipped) % 1000 == 1:
            logging.getLogger(__name__).warning("evaluation skips %s", self.skipped[-1])

    def _answer_scores(self, vlm: Any, group: Group) -> dict[str, float]:
        """Generate the answers of the first `num_generations` rows; all ranks get their scores."""
        settings = self.settings
        limit = min(settings.num_generations, settings.limit or settings.num_generations)
        results: list[Any] = []
        for part in self._batches(group, limit):
            prompts = []
            images = []
            references = []
            for held_out in part:
                decoded = self._try(held_out, self.reader.images_of)
                if decoded is None:
                    continue
                messages = conversations_of(held_out.row, self.reader.question)[0]
                last = max(
                    index for index, each in enumerate(messages) if each["role"] == "assistant"
                )
                prompt = messages[:last]
                num_images = sum(
                    piece["type"] == "image" for each in prompt for piece in each["content"]
                )
                prompts.append(prompt)
                images.append(decoded[:num_images])
                texts = held_out.row.texts
                answers = [message_text(messages[last])] if held_out.row.messages else texts
                references.append((held_out.number, answers))
            if prompts:
                answers = vlm.answer(prompts, images, MAX_NEW_TOKENS)
                results += [
                    [*reference, answer]
                    for reference, answer in zip(references, answers, strict=True)
                ]
            self.on_rows(len(part))
        results = gather_sorted(results, group)
        if not results:
            return {}
        return answer_scores(
            [answer for _, _, answer in results], [texts for _, texts, _ in results]
        )


def answer_scores(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Compare generated answers with reference answers.

    Args:
        answers: One generated answer per row.
        references: Correct answers of each row, at least one.

    Returns:
        `exact_match`, `vqa_accuracy`, `anls` and `bleu_4` (0 to 1), `cider` (0 to 10), and
        `answered` (number of rows).
    """
    return caption_scores(answers, references) | {
        "exact_match": exact_match(answers, references),
        "vqa_accuracy": vqa_accuracy(answers, references),
        "anls": anls(answers, references),
        "answered": float(len(answers)),
    }
