"""Any vision-language model of transformers: rows with any number of images in, the
next-token loss out.

Every module, weight name and the arithmetic of a row are those of transformers. mmray adds packed
rows, the normalization of uint8 pixels on the device, and a loss without a matrix of all logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmray.data.messages import Message
from mmray.data.stream.collate import Batch
from mmray.data.vlm.collate import (
    ROW_COLUMNS,
    RowCollator,
    join_media,
    padded_columns,
    rope_index_of,
    token_types,
    with_all_media,
)
from mmray.data.vlm.encoder import TOKEN_TYPES, EncodedRow, ProcessorEncoder, encoder_arguments
from mmray.data.vlm.families import (
    GENERAL,
    WEIGHTS_SETTING,
    has_weights,
    is_packable,
)
from mmray.errors import UsageError
from mmray.models import lora
from mmray.models.protocol import (
    PRETRAINED,
    ROW_COUNTS,
    ROW_LOSSES,
    Model,
    Outputs,
    WeightSource,
)
from mmray.models.vlm.attention import PACKED_ATTENTION, PACKED_VISION_ATTENTION
from mmray.models.vlm.loss import chunked_cross_entropy, chunked_log_probs
from mmray.models.vlm.shared_media import features_repeated
from mmray.models.weights import load_config, load_pretrained

if TYPE_CHECKING:
    from mmray.config import Vlm as VlmConfig

# Images of synthetic batches, for dry runs.
SYNTHETIC_SIDE = 512
MAX_SYNTHETIC_IMAGES = 8
# Modules of encoders that are the projector, of Qwen.
PROJECTORS_IN_ENCODERS = (
    "merger",
    "deepstack_merger_list",
    "merger_list",
    *(f"audio_tower.proj{part}" for part in ("", 1, 2)),
)
# Columns that are not inputs of the transformers model.
OTHER_COLUMNS = (
    *ROW_COLUMNS,
    "cu_seqlens",
    "targets",
    "target_index",
    "target_weights",
    "reference",
    "source",
)


class Vlm(Model):
    """A vision-language model of transformers (AutoModelForMultimodalLM) with its next-token loss.

    Forward takes a micro-batch that `collator` built, a dict with `input_ids` int64 ([1, T] if rows
    are packed, otherwise [B, T]), `targets` int64 [N], the N tokens to predict, `target_index`
    int64 [N], the index in the flattened `input_ids` that predicts each, `target_weights` float32
    [N], and the inputs of the encoders of images, videos and audio, such as `pixel_values` uint8.
    It returns the scalars `loss_sum`, the weighted sum of the cross-entropies of the targets, and
    `num_correct`, the number of targets with the largest logit.

    Args:
        spec: The config section `model` of kind `vlm`: the name or folder of the weights, and
            limits for the tokens of a row and the pixels of an image.
        vocab_size: Not used; the weights define it.
        source: Whether to load the weights that `spec` names.

    Attributes:
        mean: Mean of each channel of images, for pixels in 0..255, float [3]; empty if the model
            takes no images.
        std: Standard deviation of each channel in the same way.
        video_mean: Mean of each channel of videos, float [3]; empty if the model takes no videos.
        video_std: Standard deviation of each channel of videos in the same way.
        pairs: Whether synthetic rows are chosen and rejected answers, as dpo trains on.
        has_reference: Whether the batches of dpo have the log-probabilities of the reference model;
            otherwise the model without its adapters is the reference.

    Raises:
        UsageError: The weights cannot be loaded, or are not supported.
    """

    # Its embeddings are called outside the decoder, so the decoder cannot be gathered by itself.
    shards_branches = False

    pairs = False
    has_reference = True

    mean: Tensor
    std: Tensor
    video_mean: Tensor
    video_std: Tensor

    def __init__(
        self, spec: VlmConfig, vocab_size: int = 0, source: WeightSource = PRETRAINED
    ) -> None:
        super().__init__()
        inputs = spec.inputs
        self.encoder = ProcessorEncoder(spec.weights, **encoder_arguments(inputs))
        self.net = _build(spec.weights, source)
        self.family = self.encoder.family
        self.text_config = self.net.config.get_text_config()
        self.dummy = self.encoder.encode_dummy()
        self.packed = is_packable(self.net.config.to_dict(), self.family)
        # Of pixels 0 to 255; settings, not weights. Empty without images or videos.
        for prefix, part in (("", "image_processor"), ("video_", "video_processor")):
            settings = self.encoder.media_settings(part)
            scale = 1 / settings.get("rescale_factor", 1)
            for name in ("mean", "std"):
                given = settings.get(f"image_{name}") or []
                values = torch.tensor(given, dtype=torch.float64)
                self.register_buffer(prefix + name, scale * values, persistent=False)
        head = self.net.get_output_embeddings()
        if head is None or head.bias is not None:
            raise UsageError(
                f"{WEIGHTS_SETTING}: {spec.weights} has no output layer, or one with a bias, which "
                "is not supported"
            )
        from mmray.models.vlm.self_check import check_general_model, find_unused_parameters

        if "unused" in source.saved:
            self.unused: list[str] = source.saved["unused"]
        else:
            if self.family == GENERAL:
                check_general_model(self)
            self.unused = find_unused_parameters(self)
        for name in self.unused:
            self.net.get_parameter(name).requires_grad_(False)

    def architecture(self) -> dict[str, Any]:
        """Return what is needed to build the same model without reading its weights."""
        return {"config": self.net.config.to_dict(), "unused": self.unused}

    @property
    def packed(self) -> bool:
        """Whether rows of a micro-batch are concatenated to one sequence, not padded.

        Setting it selects the attention functions of the language model, and of the encoders of
        Qwen-VL and Omni. Collators that were built before are not changed.
        """
        return self._packed

    @packed.setter
    def packed(self, packed: bool) -> None:
        self._packed = packed
        if self.family == GENERAL:
            return
        self.text_config._attn_implementation = PACKED_ATTENTION if packed else "sdpa"
        if self.family.pixels == "patches":
            for encoder in self._encoders().values():
                encoder.config._attn_implementation = PACKED_VISION_ATTENTION if packed else "sdpa"

    def collator(self, pairs: bool = False) -> RowCollator:
        """Return the collator, which builds micro-batches of this model from encoded rows.

        It maps a sequence of EncodedRow (token ids, loss mask and inputs of the encoders of media
        of a row) to the batch that `forward` reads.

        Args:
            pairs: Whether rows are chosen and rejected answers.
        """
        rope_index = rope_index_of(self.net.config) if self.family.mrope else None
        config = self.net.config
        return RowCollator(self.family, config, self.dummy, self.packed, rope_index, pairs)

    def synthetic_batch(self, rows: int) -> Batch:
        """Return a batch of artificial rows of the maximum length, to measure memory and speed.

        Each row has `model.inputs.max_tokens` tokens. It has up to 8 blank images of 512 x 512
        pixels (or silences of the longest audio, or both in turn), as far as they fit, and every
        token but the first is a target.

        Args:
            rows: Number of rows, R.

        Returns:
            The columns key (hash of a row's key), label and pos int64 [R], valid bool [R],
            num_tokens int32 [R], and the inputs that `forward` reads. The tensors are on the CPU.
        """
        encoder = self.encoder
        kinds = [kind for kind in encoder.kinds if kind != "video"]
        length_s = encoder.max_audio_s if "audio" in kinds else 0.0
        blanks = [encoder.blank(kind, SYNTHETIC_SIDE, length_s) for kind in kinds]
        parts = [{"type": kind} for kind in kinds]
        row = self.dummy
        for number in range(1, MAX_SYNTHETIC_IMAGES + 1):
            content = (parts * number)[:number]
            messages = [{"role": "user", "content": content}]
            larger = encoder.encode_prompt(messages, (blanks * number)[:number])
            if len(larger.input_ids) > encoder.max_tokens:
                break
            row = larger
        added = (0, max(0, encoder.max_tokens - len(row.input_ids)))
        ids = np.pad(row.input_ids, added, constant_values=row.input_ids[-1])
        types = {name: np.pad(column, added) for name, column in row.token_types.items()}
        full = EncodedRow(ids, np.ones(len(ids), np.float32), row.images, types)
        if self.pairs:
            full = replace(full, rejected=full, reference=np.zeros(2))
        columns = {
            "key": torch.arange(rows),
            "label": torch.full((rows,), -1),
            "valid": torch.ones(rows, dtype=torch.bool),
            "pos": torch.arange(rows),
            "num_tokens": torch.full(
                (rows,), len(ids) * len(full.conversations), dtype=torch.int32
            ),
        }
        return columns | self.collator(self.pairs)([full] * rows)

    def forward(self, batch: Batch) -> Outputs:
        """Return the next-token loss of a micro-batch, a weighted sum over its targets.

        Args:
            batch: A batch of `collator` for T tokens, of which N are predicted:
                - input_ids: int64 [1, T] if rows are packed, otherwise [B, longest row].
                - targets: int64 [N], the tokens to predict.
                - target_index: int64 [N], the index in the flattened input_ids that predicts each
                  target.
                - target_weights: float32 [N], the factor of the loss of each target.
                - cu_seqlens: int32 [R + 1], the start of each row, and then T; only if packed.
                - pixel_values: uint8, the other inputs of the vision encoder, and position_ids.
                - reference: float64 [R, 2], of dpo.

        Returns:
            Two scalars: `loss_sum`, the weighted sum of the cross-entropies, and `num_correct`
            int64, the number of targets with the largest logit; for a mixture of sets also
            `row_losses` and `row_counts`, those of the targets of each row, [R]. Of dpo
            `log_probs`, `reference_log_probs` and `num_targets`, [R, 2] for R chosen and rejected
            answers.
        """
        if "reference" in batch:
            return self._log_probs_of_pairs(batch)
        hidden = self.hidden_states(batch).flatten(0, 1)[batch["target_index"]]
        losses = torch.zeros_like(batch["target_weights"])
        loss_sum, num_correct = chunked_cross_entropy(
            hidden,
            self.net.get_output_embeddings().weight,
            batch["targets"],
            batch["target_weights"],
            losses,
        )
        outputs = {"loss_sum": loss_sum, "num_correct": num_correct}
        return outputs | self._sum_by_row(batch, losses) if "source" in batch else outputs

    def _sum_by_row(self, batch: Batch, losses: Tensor) -> Outputs:
        """Return the sum of the losses [N] of the targets of each row, and the number of these
        targets, float32 [R].
        """
        sums = _sum_by_conversation(batch, torch.stack([losses, torch.ones_like(losses)]))
        # Only valid rows have a conversation.
        of_row = (batch["valid"].cumsum(0) - 1).clamp(min=0)
        return dict(zip((ROW_LOSSES, ROW_COUNTS), sums[:, of_row], strict=True))

    def _log_probs_of_pairs(self, batch: Batch) -> Outputs:
        reference = batch["reference"]
        if not self.has_reference:
            was_training = self.training
            # Dropout would add noise to the reference.
            with torch.no_grad(), lora.adapters_disabled(self.eval()):
                reference = self._log_probs(batch)
            self.train(was_training)
        ones = torch.ones_like(batch["target_index"], dtype=torch.float)
        return {
            "log_probs": self._log_probs(batch),
            "reference_log_probs": reference,
            "num_targets": self._sum_by_answer(batch, ones),
        }

    def _log_probs(self, batch: Batch) -> Tensor:
        """Return the weighted sum of the log-probabilities of the targets of each answer [R, 2]."""
        hidden = self.hidden_states(batch).flatten(0, 1)[batch["target_index"]]
        weight = self.net.get_output_embeddings().weight
        log_probs = chunked_log_probs(hidden, weight, batch["targets"])
        weighted = log_probs * batch["target_weights"].to(log_probs.dtype)
        return self._sum_by_answer(batch, weighted)

    def _sum_by_answer(self, batch: Batch, values: Tensor) -> Tensor:
        """Return the sum of values [N] of targets for each chosen and rejected answer, [R, 2]."""
        sums = _sum_by_conversation(batch, values)
        # Those with the chosen answers are first, and each half may have a dummy row.
        return sums.view(2, -1).T[: len(batch["reference"])]

    def hidden_states(self, batch: Batch) -> Tensor:
        """Return the hidden states after the last layer, [1, T, H] if rows are packed."""
        inputs = self.model_inputs(batch)
        is_shared = "reference" in batch and self.family.shares_media
        with features_repeated(self.net.model) if is_shared else nullcontext():
            output: Tensor = self.net.model(**inputs, use_cache=False).last_hidden_state
        return output

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the keyword arguments with which the transformers model is called for a batch.

        Args:
            batch: A micro-batch that `collator` built: tensors by column, such as `input_ids`,
                `position_ids` and `pixel_values` (uint8). Columns that only the loss reads are left
                out.

        Returns:
            `input_ids`, `pixel_values` (normalized) and the others that the model reads, by name.
        """
        inputs: dict[str, Any] = {
            name: column for name, column in batch.items() if name not in OTHER_COLUMNS
        }
        inputs |= self._image_inputs(inputs)
        if self.family == GENERAL:
            inputs = self._taken(inputs)
        if "cu_seqlens" in batch:
            inputs["cu_seq_lens_q"] = batch["cu_seqlens"]
            # Reading the longest row would wait for the device.
            inputs["max_length_q"] = batch["input_ids"].shape[1]
        return inputs

    def differs_if_packed(self) -> bool:
        """Return whether packed rows have another loss or other gradients than separate rows; it
        resets gradients to None.
        """
        from mmray.models.vlm.self_check import differs_if_packed

        return differs_if_packed(self)

    def branches(self) -> dict[str, nn.Module]:
        """Return the encoder of images (or of audio) as `vision`, the second one of a model that
        has both as `audio`, and the decoder as `language`.
        """
        return self._encoders() | {"language": self.net.get_decoder()}

    def _encoders(self) -> dict[str, Any]:
        kinds = self.encoder.kinds
        encoders = {"vision": self.net.get_encoder(modality=kinds[0])}
        if "audio" in kinds[1:]:
            encoders["audio"] = self.net.get_encoder(modality="audio")
        return encoders

    def parameter_parts(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each part: `vision`, `projector`, `language`, and
        `audio` if the model has encoders of images and of audio.

        The names are those of `named_parameters()`, and each is in one part. Embeddings and the
        output layer belong to `language`.
        """
        net = self.net
        modules = self._encoders() | {"language": net.get_decoder()}
        part_of = {
            id(weight): part for part, module in modules.items() for weight in module.parameters()
        }
        for module in (net.get_input_embeddings(), net.get_output_embeddings()):
            part_of[id(module.weight)] = "language"
        parts: dict[str, list[str]] = {name: [] for name in (*modules, "projector")}
        for name, weight in self.named_parameters():
            is_inside = any(f".{module}." in f".{name}." for module in PROJECTORS_IN_ENCODERS)
            part = "projector" if is_inside else part_of.get(id(weight), "projector")
            parts[part].append(name)
        return parts

    @torch.no_grad()
    def answer(
        self,
        conversations: Sequence[Sequence[Message]],
        images: Sequence[Sequence[Any]],
        max_new_tokens: int,
        in_lockstep: bool = False,
    ) -> list[str]:
        """Generate the assistant's next message of each conversation by greedy decoding.

        Args:
            conversations: For each conversation its messages {"role": "system" | "user" |
                "assistant", "content": ...}, of which the last is the user's. The content is a text
                or a list of parts {"type": "image" | "video" | "audio"} and {"type": "text",
                "text": ...}.
            images: For each conversation its media, one per part in order: RGB images of PIL or
                uint8 [H, W, 3], `Clip`s of videos (frames uint8 [F, H, W, 3] and their times in
                seconds), and mono audio int16 [N], `encoder.audio_rate` samples per second.
            max_new_tokens: Most tokens of an answer.
            in_lockstep: Whether all ranks of a sharded model make this call, each with its own
                conversations or none. Then each runs the vision encoder, and the decoder until the
                last rank has its answers.

        Returns:
            The answers as text without `encoder.reserved_tokens`, one for each conversation.

        Raises:
            RowError: The media of a conversation do not match its parts, or the processor rejects
                one.
        """
        rows = [
            self.encoder.encode_prompt(messages, each)
            for messages, each in zip(conversations, images, strict=True)
        ]
        if in_lockstep:
            rows = with_all_media(rows, self.dummy)
        inputs = self._left_padded(rows)
        ends: set[int] = set()
        for ids in (self.net.generation_config.eos_token_id, self.encoder.tokenizer.eos_token_id):
            if ids is not None:
                ends.update(ids if isinstance(ids, list) else [ids])
        # A compiled block has graphs for each layer of the cache.
        with self._attention_with_cache(), torch.compiler.set_stance("force_eager"):
            output = self.net.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(ends),
                pad_token_id=self._pad_id,
                synced_gpus=in_lockstep,
            )
        answers = output[: len(conversations), inputs["input_ids"].shape[1] :].tolist()
        return [self.encoder.decode([each for each in row if each not in ends]) for row in answers]

    def save_pretrained(self, folder: str, with_weights: bool = True) -> dict[str, Any]:
        """Save model, processor and chat template so that transformers and vLLM load them.

        Args:
            folder: Path of the local folder.
            with_weights: Whether to save the weights, and not only the config.

        Returns:
            Keyword arguments with which the processor must be called, because its files cannot
            have these limits; usually {}.
        """
        from transformers import AutoProcessor

        with self._attention_with_cache():
            if with_weights:
                self.net.save_pretrained(folder)
            else:
                self.net.config.save_pretrained(folder)
        # The processor of the data has no video processor.
        processor = AutoProcessor.from_pretrained(self.encoder.weights)
        arguments = self.encoder.limit_pixels(processor)
        processor.save_pretrained(folder)
        return arguments

    @property
    def _pad_id(self) -> int:
        pad_id = self.encoder.tokenizer.pad_token_id
        return int(self.encoder.tokenizer.eos_token_id if pad_id is None else pad_id)

    def _image_inputs(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the normalized pixels in the layout that the model takes, and features of audio
        in its precision.
        """
        columns = {}
        if self.family == GENERAL:
            dtype = self.net.get_input_embeddings().weight.dtype
            return {
                name: column.to(dtype)
                for name, column in inputs.items()
                if column.is_floating_point()
            }
        if "input_features" in inputs:
            columns["input_features"] = inputs["input_features"].to(self.mean.dtype)
        for name, mean, std in (
            ("pixel_values", self.mean, self.std),
            ("pixel_values_videos", self.video_mean, self.video_std),
        ):
            if name not in inputs:
                continue
            pixels = inputs[name].to(mean.dtype)
            if self.family.pixels == "patches":
                # [N, channels x values]
                channels = pixels.unflatten(1, (3, -1))
                columns[name] = ((channels - mean[:, None]) / std[:, None]).flatten(1)
            else:
                columns[name] = (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        if self.family.pixels == "row_tiles":
            columns["pixel_values"] = columns["pixel_values"][None]
            columns["pixel_attention_mask"] = inputs["pixel_attention_mask"][None]
        return columns

    def _left_padded(self, rows: list[EncodedRow]) -> dict[str, Any]:
        """Return the inputs of `generate`."""
        device = self.mean.device
        inputs: dict[str, Any] = {
            name: column.to(device) for name, column in join_media(rows).items()
        }
        if inputs:
            inputs |= self._image_inputs(inputs)
        prompts = [torch.from_numpy(row.input_ids).long() for row in rows]
        ids = pad_sequence(prompts, True, self._pad_id, padding_side="left")
        mask = pad_sequence([*map(torch.ones_like, prompts)], True, padding_side="left")
        if self.family.token_types:
            types = token_types(ids, self.net.config)
            inputs[self.family.token_types] = types.to(device)
        if self.family == GENERAL:
            columns = padded_columns(rows, ids.shape[1], on_left=True).items()
            inputs = self._taken(inputs | {name: column.to(device) for name, column in columns})
        return inputs | {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def _taken(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs without token types that the model does not take, as of tokenizers of
        text pairs.
        """
        taken = signature(self.net.model.forward).parameters
        return {
            name: column
            for name, column in inputs.items()
            if name in taken or name not in TOKEN_TYPES
        }

    @contextmanager
    def _attention_with_cache(self) -> Iterator[None]:
        """Scope with the attention of transformers, for generation and for saved configs."""
        packed = self.packed
        self.packed = False
        try:
            yield
        finally:
            self.packed = packed


def _sum_by_conversation(batch: Batch, values: Tensor) -> Tensor:
    """Return the sums [..., R] of values [..., N] of the targets of each conversation."""
    index = batch["target_index"]
    if "cu_seqlens" in batch:
        ends = batch["cu_seqlens"][1:].long()
        num = len(ends)
        conversation = torch.searchsorted(ends, index, right=True)
    else:
        num, length = batch["input_ids"].shape
        conversation = index // length
    return values.new_zeros(*values.shape[:-1], num).index_add(-1, conversation, values)


def _build(weights: str, source: WeightSource) -> Any:
    """Build the transformers model; of a folder with a config but no weights with random ones."""
    from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, GenerationConfig

    saved = source.saved.get("config")
    if saved is None:
        config = load_config(WEIGHTS_SETTING, weights)
    else:
        config = CONFIG_MAPPING[saved["model_type"]].from_dict(saved)
    if source.pretrained and has_weights(weights):
        return load_pretrained(WEIGHTS_SETTING, weights, AutoModelForMultimodalLM, config)
    net = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with suppress(OSError):  # without the file it is of the config
        net.generation_config = GenerationConfig.from_pretrained(weights)
    return net
