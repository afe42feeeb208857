"""Evaluation of vision-language models on held-out conversations: loss, perplexity and token
accuracy of the assistant's turns, the scores of generated answers, and multiple choice.

An answer is generated for the last turn of a conversation, after the turns before it. A row that
only has captions has all of them as reference answers to the same question. Reasoning, up to
`</think>`, is no part of an answer. Of a multiple-choice question the option is chosen whose
tokens, with those of the end of the turn, have the largest mean log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmray.data.images.decode import BadImage, decode
from mmray.data.images.transform import thumbnail
from mmray.data.media.clips import full_span
from mmray.data.media.decode import read_frames
from mmray.data.messages import Message, message_text, split_options
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.store.stored_row import Media, Row
from mmray.data.vlm.chat_template import RowError
from mmray.data.vlm.encoder import EncodedRow
from mmray.data.vlm.reader import ADAPTERS_OFF, ConversationReader, ReferenceLogProbs
from mmray.evaluation.answers import References, anls, exact_match, vqa_accuracy
from mmray.evaluation.batches import EvalReader, OnProgress, SaveExamples
from mmray.evaluation.embeddings import eval_mode, in_lockstep, steps_in_lockstep
from mmray.models.lora import adapted_layers
from mmray.objectives.protocol import Objective

if TYPE_CHECKING:
    from mmray.config import Config
    from mmray.engine.collectives import Group
    from mmray.models.vlm.model import Vlm

MAX_NEW_TOKENS = 64  # tokens of an answer
MAX_BATCH = 64  # rows of a forward pass
NUM_SHOWN = 6  # correct answers, and wrong ones, in the report


class Answer(NamedTuple):
    """A generated answer to a held-out row.

    Attributes:
        number: Index of the row in the set.
        references: The correct answers.
        text: The generated answer.
    """

    number: int
    references: list[str]
    text: str


# Metrics of dpo, in the order in which they are summed.
PREFERENCE_METRICS = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected")


class ConversationEvaluator(EvalReader):
    """Computes loss, perplexity and the scores of generated answers of a vision-language model.

    `score(model, group, objective, global_batch_size)` returns metrics by name, such as `loss` and
    `perplexity`.

    Args:
        prepared: The set with the held-out rows.
        max_pixels: Images with more pixels are not decoded.
        on_progress: Called with (unit, number) when a batch of `rows` or `prompts` is done; None:
            not called.
    """

    def __init__(
        self,
        config: Config,
        prepared: PreparedSet,
        max_pixels: int,
        on_progress: OnProgress | None = None,
    ) -> None:
        spec: Any = config.model
        batch = min(MAX_BATCH, config.evaluate.batch)
        super().__init__(prepared, config.evaluate.replace(batch=batch), on_progress)
        self.reader = ConversationReader(prepared, spec, max_pixels, config.data)
        self.pair_reader: ConversationReader | None = None
        if config.objective.is_dpo:
            references = ReferenceLogProbs(config.objective.reference)
            self.pair_reader = ConversationReader(
                prepared, spec, max_pixels, config.data, references
            )

    @torch.no_grad()
    def score(
        self,
        model: Vlm,
        group: Group,
        objective: Objective | None,
        global_batch_size: int,
        save_examples: SaveExamples | None = None,
    ) -> dict[str, float]:
        """Return the metrics of a vision-language model on held-out conversations.

        A collective call of all ranks, each of which reads its part of the rows.

        Args:
            model: The vision-language model, not wrapped by DDP. It may be sharded by FSDP, whose
                ranks must make the same calls; ranks with fewer readable rows then call it with a
                synthetic row, which is not counted.
            objective: For the metrics of dpo; the loss is the assistant's cross-entropy.
            global_batch_size: Unused.
            save_examples: Called with some generated answers, what `answer_examples` returns and
                `rows` (the content of examples.json). Given on one rank or none; None: not called.

        Returns:
            Equal on all ranks: `loss` (mean over the assistant's tokens), `perplexity`,
            `token_accuracy` (0 to 1), `tokens`, `rows` and `bad_rows` (counts). If rows have
            options, `choice_accuracy` (0 to 1) and `choice_rows`. With `evaluate.num_generations`
            also `exact_match`, `vqa_accuracy` and `anls` (0 to 1), `answered` (rows with a
            generated answer), and those of `evaluate.metrics`. With dpo also `preference_loss` and
            PREFERENCE_METRICS.

        Raises:
            DataError: No row is readable; raised on every rank.
        """
        self.reader.encoder = model.encoder  # otherwise the processor is loaded twice
        with eval_mode(model):
            sums = self._sum_losses(model, group, objective)
        totals = group.all_gather_variable(sums[None]).sum(0).tolist()
        loss, tokens, correct, rows, choices, chosen, *of_pairs = totals
        bad_rows = self.count_bad_rows(int(rows), group)
        answers: list[Answer] = []
        if self.settings.num_generations:
            with eval_mode(model):
                answers = self._generate_answers(model, group)
        if answers and save_examples is not None:
            examples = answer_examples(answers, self.prepared, self.reader.question)
            save_examples({"rows": int(rows)} | examples)
        mean = loss / max(1.0, tokens)
        metrics = {
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),  # exp of more is infinite
            "token_accuracy": correct / max(1.0, tokens),
            "tokens": tokens,
            "rows": rows,
            "bad_rows": float(bad_rows),
            **_preference_metrics(*of_pairs),
        }
        if choices:
            metrics |= {"choice_accuracy": chosen / choices, "choice_rows": choices}
        if not answers:
            return metrics
        texts = [answer.text for answer in answers]
        references = [answer.references for answer in answers]
        metrics |= answer_scores(texts, references)
        return self.add_own_metrics(metrics, group, texts, references)

    def _open_pairs(self, model: Vlm) -> ConversationReader | None:
        """Return the reader of pairs if log-probabilities of the reference model are known."""
        if self.pair_reader is None or self.pair_reader.references is None:
            return None
        self.pair_reader.encoder = model.encoder
        column = self.pair_reader.references.column
        if column == ADAPTERS_OFF:
            is_known = any(adapted_layers(model))
        else:
            is_known = f"{column}_chosen" in self.prepared.manifest.columns
        if not is_known:
            return None
        model.has_reference = column != ADAPTERS_OFF
        return self.pair_reader

    def _sum_losses(self, model: Vlm, group: Group, objective: Objective | None) -> Tensor:
        """Return sums of this rank, float64 [12]: loss, target tokens, correct ones and rows, rows
        with options and those answered correctly, and of dpo the number of rows, the loss, and
        PREFERENCE_METRICS.
        """
        collate = model.collator()
        pairs = self._open_pairs(model)
        sums = torch.zeros(8 + len(PREFERENCE_METRICS), dtype=torch.float64)
        batches = self.batches(group.rank, group.world_size, self.settings.limit)
        for part in steps_in_lockstep(model, batches, group):
            encoded: list[EncodedRow] = []
            for number, held_out in part or ():
                try:
                    encoded += self._encode(held_out)
                    sums[3] += 1
                except (BadImage, RowError) as error:
                    self.skip(number, error, held_out.source)
            if encoded or in_lockstep(model, group):
                batch = collate(encoded)
                outputs = model({name: each.to(group.device) for name, each in batch.items()})
                sums[0] += outputs["loss_sum"].double().cpu()
                sums[1] += len(batch["targets"])
                sums[2] += outputs["num_correct"].double().cpu()
            sums[4:6] += self._sum_choices(model, group, part or ())
            if pairs is not None and objective is not None:
                sums[6:] += self._sum_pairs(model, group, pairs, objective, part or ())
        return sums

    def _sum_choices(self, model: Vlm, group: Group, part: Sequence[tuple[int, Row]]) -> Tensor:
        """Return the number of rows with options, and of those whose right option has the largest
        mean log-probability of its tokens; among equal ones the first counts, as in lm-eval.
        """
        rows: list[list[EncodedRow]] = []
        answers: list[int] = []
        for _, row in part:
            if (split := split_options(row.messages or [])) is not None:
                with suppress(BadImage, RowError):
                    rows.append(self._encode_options(row, split[0]))
                    answers.append(split[1])
        # A forward computes two options of each row.
        num_forwards = max(map(len, rows), default=0)
        if in_lockstep(model, group):
            num_forwards = max(group.all_gather_objects(num_forwards))
        scores: list[list[float]] = [[] for _ in rows]
        collate = model.collator(pairs=True)
        has_reference, model.has_reference = model.has_reference, True
        for number in range(num_forwards):
            own = [index for index, pairs in enumerate(rows) if number < len(pairs)]
            batch = collate([rows[index][number] for index in own])
            outputs = model({name: each.to(group.device) for name, each in batch.items()})
            means = (outputs["log_probs"] / outputs["num_targets"]).tolist()
            for index, values in zip(own, means, strict=False):
                scores[index] += values
        model.has_reference = has_reference
        correct = sum(
            values.index(max(values)) == answer
            for values, answer in zip(scores, answers, strict=True)
        )
        return torch.tensor([len(rows), correct], dtype=torch.float64)

    def _encode_options(
        self, row: Row, conversations: Sequence[Sequence[Message]]
    ) -> list[EncodedRow]:
        """Return the conversations of a row with its options in pairs; the last one may be twice.

        Raises as `encode_row`.
        """
        media = self.reader.media_of(row)
        encoded = self.reader.encoder.encode_all(conversations, media)
        encoded += encoded[-1:] * (len(encoded) % 2)
        return [
            replace(first, rejected=second, reference=np.zeros(2))
            for first, second in zip(encoded[::2], encoded[1::2], strict=True)
        ]

    def _sum_pairs(
        self,
        model: Vlm,
        group: Group,
        pairs: ConversationReader,
        objective: Objective,
        part: Sequence[tuple[int, Row]],
    ) -> Tensor:
        """Return the number of rows with both answers, their loss, and the sums of the metrics."""
        values = self.prepared.columns(np.array([number for number, _ in part], np.int64))
        column = pairs.references.column if pairs.references is not None else ""
        encoded = []
        for (_, row), columns in zip(part, values, strict=True):
            names = (f"{column}_chosen", f"{column}_rejected")
            reference = np.array([columns.get(name) for name in names], np.float64)
            if model.has_reference and np.isnan(reference).any():
                continue
            with suppress(BadImage, RowError):
                encoded.append(replace(pairs.encode_row(row), reference=reference))
        if not encoded and not in_lockstep(model, group):
            return torch.zeros(2 + len(PREFERENCE_METRICS), dtype=torch.float64)
        batch = model.collator(pairs=True)(encoded)
        batch = {name: each.to(group.device) for name, each in batch.items()}
        batch["valid"] = torch.ones(len(encoded), dtype=torch.bool, device=group.device)
        loss, count, sums = objective.compute_loss(model(batch), batch)
        parts = [count, loss, *(sums[name] for name in PREFERENCE_METRICS)]
        return torch.stack([each.double().cpu() for each in parts])

    def _encode(self, row: Row) -> list[EncodedRow]:
        """Return the conversations of a row: one, or one for each caption. Raises as
        `encode_row`.
        """
        num_conversations = 1 if row.messages else len(row.texts)
        return [self.reader.encode_row(row, choice) for choice in range(num_conversations)]

    def _generate_answers(self, vlm: Vlm, group: Group) -> list[Answer]:
        """Generate the answers of the first `num_generations` rows; all ranks get all of them."""
        settings = self.settings
        limit = min(settings.num_generations, settings.limit or settings.num_generations)
        own_answers: list[Answer] = []
        batches = self.batches(group.rank, group.world_size, limit)
        for part in steps_in_lockstep(vlm, batches, group):
            prompts = []
            media = []
            references = []
            for number, row in part or ():
                try:
                    self._encode(row)  # a row that is too long has no answer either
                    decoded = self.reader.media_of(row)
                except (BadImage, RowError):  # skipped and counted with the losses
                    continue
                conversations = row.conversations(self.reader.question)
                prompt = _prompt(conversations[0])
                num_media = sum(
                    piece["type"] != "text" for each in prompt for piece in each["content"]
                )
                prompts.append(prompt)
                media.append(decoded[:num_media])
                # The media are those in the span of the first caption.
                correct = [
                    messages[len(prompt)]
                    for choice, messages in enumerate(conversations)
                    if not row.spans or row.spans[choice] == row.spans[0]
                ]
                # Generated answers have no reserved tokens either.
                cleaned = self.reader.encoder.template.clean(correct)
                references.append(
                    (number, [without_reasoning(message_text(each)) for each in cleaned])
                )
            lockstep = in_lockstep(vlm, group)
            if prompts or lockstep:
                answers = vlm.answer(prompts, media, MAX_NEW_TOKENS, lockstep)
                own_answers += [
                    Answer(number, texts, without_reasoning(answer))
                    for (number, texts), answer in zip(references, answers, strict=True)
                ]
        return sorted(chain.from_iterable(group.all_gather_objects(own_answers)))


def _preference_metrics(num_pairs: float, *sums: float) -> dict[str, float]:
    """Return the means over rows with both answers; {} without such rows."""
    names = ("preference_loss", *PREFERENCE_METRICS)
    return {name: value / num_pairs for name, value in zip(names, sums, strict=True) if num_pairs}


def without_reasoning(text: str) -> str:
    """Return an answer without its reasoning, as chat templates split it at the last `</think>`."""
    reasoning, _, answer = text.rpartition("</think>")
    return answer.lstrip("\n") if reasoning else answer


def answer_scores(texts: Sequence[str], references: References) -> dict[str, float]:
    """Compare generated answers with the correct ones.

    Returns:
        `exact_match`, `vqa_accuracy` and `anls` (0 to 1), and `answered` (number of rows).
    """
    return {
        "exact_match": exact_match(texts, references),
        "vqa_accuracy": vqa_accuracy(texts, references),
        "anls": anls(texts, references),
        "answered": float(len(texts)),
    }


def answer_examples(
    answers: Sequence[Answer], prepared: PreparedSet, question: str
) -> dict[str, Any]:
    """Return answers to show with their conversations: correct ones, then wrong ones, each spread
    over the set.

    Args:
        answers: Generated answers, sorted by row: `number` of the row, `references` (correct
            answers) and `text`.
        question: User message of rows that only have captions.

    Returns:
        JSON values for examples.json: `answers` is a list of {key, turns, references, answer,
        correct}, of which `turns` is the conversation before the answer, [{role, parts}] with parts
        {text} and {image}, a data URI. Rows that cannot be read are omitted.
    """
    by_result: dict[bool, list[Answer]] = {True: [], False: []}
    for answer in answers:
        by_result[exact_match([answer.text], [answer.references]) == 1].append(answer)
    entries: list[dict[str, Any]] = []
    for correct, group in by_result.items():
        step = max(1, len(group) // NUM_SHOWN)
        for answer in group[::step][:NUM_SHOWN]:
            with suppress(OSError, ValueError):
                [row] = prepared.read(np.array([answer.number]))
                entries.append(
                    {
                        "key": row.key,
                        "turns": _shown_turns(row, question),
                        "references": answer.references,
                        "answer": answer.text,
                        "correct": correct,
                    }
                )
    return {"answers": entries}


def _shown_turns(row: Row, question: str) -> list[dict[str, Any]]:
    """Return the messages before the last answer, with thumbnails of their images and of the middle
    of their videos.
    """
    media = iter(row.media)
    turns = []
    for message in _prompt(row.conversations(question)[0]):
        parts = [
            {"text": part["text"]}
            if part["type"] == "text"
            else _shown_medium(next(media), row.spans)
            for part in message["content"]
        ]
        turns.append({"role": message["role"], "parts": parts})
    return turns


def _shown_medium(media: Media, spans: Sequence[Any] | None) -> dict[str, Any]:
    if media.kind == "image":
        return {"image": thumbnail(decode(media.data))}
    start, end = full_span(media) if not spans or spans[0] is None else spans[0]
    if media.kind == "audio":
        return {"text": f"[audio, {start:.1f} to {end:.1f} s]"}
    frames, _ = read_frames(media.data, [(start + end) / 2])
    return {"image": thumbnail(frames[0])}


def _prompt(messages: Sequence[Message]) -> list[Message]:
    """Return the messages before the last one of the assistant that is a target and has a text."""
    indices = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
    answers = [
        index
        for index in indices
        if messages[index].get("weight", 1) and message_text(messages[index]).strip()
    ]
    return list(messages[: (answers or indices)[-1]])
