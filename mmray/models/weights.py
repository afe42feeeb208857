"""Weights: safetensors files and pretrained models of transformers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeVar
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mmray.errors import UsageError, first_line
from mmray.models.protocol import WeightSource
from mmray.plugins import check_installed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    from mmray.config.model_kinds import Transformer

M = TypeVar("M", bound=nn.Module)
WEIGHTS_SETTING = "model.weights"
HAVE_POOLER_OPTION = ("vit", "bert", "roberta", "xlm-roberta", "camembert", "ernie", "albert")
# Sinusoidal positions of the encoders of Whisper and Qwen2-Audio, which are not trained.
SINUSOIDS = ("encoder.embed_positions.weight", "audio_tower.embed_positions.weight")
# Names in configs of transformers.
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
READ_ERRORS = (
    OSError,
    SafetensorError,
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    BadZipFile,
)


@contextmanager
def parameters_on(device: torch.device | str) -> Iterator[None]:
    """Context manager in whose block modules are built with their parameters on a device, where
    random values are drawn; buffers stay on the CPU.

    Args:
        device: The device; `meta` for parameters without memory, whose values are replaced later.
    """
    device = torch.device(device)

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.device == device:
            return None
        return nn.Parameter(parameter.detach().to(device), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def copy_to_meta(module: M) -> M:
    """Return a copy of a module on the meta device, which takes no memory."""
    copies: dict[int, Tensor] = {
        id(weight): nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
        for weight in module.parameters()
    }
    copies |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    return copy.deepcopy(module, copies)


def save_weights(
    weights: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a state_dict as safetensors; tied weights are copied.

    Args:
        weights: Tensors by name.
        file: The local file to write.
        metadata: Further entries of the header, str by name.

    Raises:
        SafetensorError: The tensors cannot be written.
        OSError: The file cannot be written.
    """
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        storage = tensor.untyped_storage().data_ptr()
        whole = tensor.detach().contiguous()
        out[name] = whole.clone() if storage in seen else whole
        seen.add(storage)
    file.touch()
    # The mode of the umask, because safetensors creates files that only the owner can read.
    mode = file.stat().st_mode
    save_file(out, file, metadata={"format": "pt"} | (metadata or {}))
    file.chmod(mode)


def read_state_dict(setting: str, file: str, device: str = "cpu") -> dict[str, Tensor]:
    """Read a state_dict from a file (.safetensors or torch.save) without running code of the file.

    Args:
        setting: Name of the setting that has the path, such as `model.weights`, for errors.
        file: Path of the file; `~` is expanded.
        device: `cpu`, or `meta` for shapes only.

    Returns:
        Tensors on the device by name. Of a training checkpoint with a key `state_dict`, its value.

    Raises:
        UsageError: The file does not exist, is damaged, or contains something else.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(f"{setting}: no file {path}; check the path")
    try:
        if path.suffix == ".safetensors":
            if device == "meta":
                with safe_open(path, "pt") as saved:
                    return {
                        name: torch.empty(saved.get_slice(name).get_shape(), device=device)
                        for name in saved.offset_keys()
                    }
            return load_file(path)
        state = torch.load(path, map_location=device, weights_only=True)
    except READ_ERRORS as error:
        if "TorchScript" in str(error):
            raise UsageError(
                f"{setting}: {path} is a TorchScript archive, which holds code and is not read. "
                "Use the safetensors file or folder of the same model, or save its weights: "
                f"torch.save(torch.jit.load({str(path)!r}).state_dict(), 'weights.pt')"
            ) from None
        raise UsageError(
            f"{setting}: cannot read weights from {path}: {first_line(error)}"
        ) from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]  # a training checkpoint with epoch and optimizer
    if not isinstance(state, dict) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise UsageError(
            f"{setting}: {path} is not a state_dict (names to tensors); save `model.state_dict()`"
        )
    return state


def load_state(net: nn.Module, state: dict[str, Tensor], problem: str) -> None:
    """Load a state_dict with equal names and shapes into a module, maybe on the meta device.

    Raises:
        UsageError: Names or shapes differ; the message starts with `problem`.
    """
    dtypes = {name: tensor.dtype for name, tensor in net.state_dict().items()}
    copies = {
        name: tensor.to(dtypes.get(name, tensor.dtype), copy=True) for name, tensor in state.items()
    }
    try:
        net.load_state_dict(copies, assign=True)
    except RuntimeError as error:
        details = [shorten(line, 160) for line in str(error).splitlines()[1:4]]
        raise UsageError(f"{problem}: {'; '.join(details)}") from None


def load_local_or_hub(setting: str, name: str, read: Callable[..., Any], **options: object) -> Any:
    """Read a config, tokenizer or model of transformers from a folder, the hub cache, or the
    Hugging Face hub, in this order.

    Args:
        setting: Name of the setting that has `name`, such as `model.weights`, for errors.
        name: Path of a folder, or a name on the hub.
        read: Such as `AutoConfig.from_pretrained`; called with the name as argument, `options`, and
            `local_files_only=True` except for a download.
        options: Further keyword arguments of `read`.

    Returns:
        What `read` returns.

    Raises:
        UsageError: It cannot be read.
    """
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return read(str(path), local_files_only=True, **options)
        with suppress(*READ_ERRORS):
            return read(name, local_files_only=True, **options)
        return read(name, **options)
    except READ_ERRORS as error:
        hint = (
            f". Without a network, run `hf download {name} --local-dir DIR` elsewhere and set "
            f"{setting} to DIR"
        )
        where = "" if path.is_dir() else " from a directory, the hub cache or the hub"
        raise UsageError(
            f"{setting}: cannot load `{name}`{where}: "
            f"{first_line(error).rstrip('.')}{hint if where else ''}"
        ) from None


def load_config(setting: str, name: str, supported: Collection[str] | None = None) -> Any:
    """Load the config of a saved model of transformers.

    Args:
        setting: Name of the setting that has `name`, such as `model.weights`, for errors.
        name: Path of a folder, or a name on the Hugging Face hub, from which the config is
            downloaded unless it is in the cache.
        supported: Values of `model_type` that are accepted, such as `clip`; None: all.

    Returns:
        The config, of a subclass of transformers' PretrainedConfig; of a whole Omni model that of
        its thinker.

    Raises:
        UsageError: There is no such model, it is of another type, or timm is not installed.
    """
    from transformers import AutoConfig

    try:
        config = load_local_or_hub(setting, name, AutoConfig.from_pretrained)
    except ImportError:  # transformers needs it for the config of a timm model
        check_installed("timm", setting, "timm")
        raise
    # The part of a whole Omni model that reads media and writes text.
    config = getattr(config, "thinker_config", config)
    if config.model_type == "timm_wrapper":
        check_installed("timm", setting, "timm")
        # transformers passes 0, for a model without its head
        (config.model_args or {}).pop("num_classes", None)
    if supported is not None and config.model_type not in supported:
        raise UsageError(
            f"{setting}: {name} holds a model of type {config.model_type!r}; supported are "
            f"{', '.join(supported)}"
        )
    return config


def set_dropout(config: PreTrainedConfig, dropout: float) -> None:
    """Set the dropout of hidden states and attention in a config of transformers that has it."""
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, dropout)


def freeze_batch_norms(module: nn.Module) -> None:
    """Set each BatchNorm2d of a module to evaluation mode, in which it keeps its statistics; call
    it after `train`, which sets them to training mode.
    """
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.eval()


def encoder_config(
    part: str, setting: str, name: str, supported: Collection[str], source: WeightSource
) -> Any:
    """Return the config of an encoder: the one that a run saved for this part, otherwise that of
    its weights.

    Raises:
        UsageError: The config of the weights cannot be read, or is of another type.
    """
    from transformers import AutoConfig

    if part in source.saved:
        return AutoConfig.for_model(**source.saved[part])
    return load_config(setting, name, supported)


def load_pretrained(
    setting: str,
    name: str,
    model_class: type[PreTrainedModel | _BaseAutoModelClass],
    config: PreTrainedConfig,
    **options: object,
) -> Any:
    """Load a saved model of transformers in evaluation mode, in float32 unless `options` has a
    `dtype`.

    Args:
        name: Path of a folder, or a name on the Hugging Face hub, from which the weights are
            downloaded unless they are in the cache.
        options: Further keyword arguments of `from_pretrained`.

    Returns:
        The model, an instance of `model_class` or, for AutoModel, of the class of its config.

    Raises:
        UsageError: The model cannot be read, or its files lack weights.
    """
    options = {"dtype": torch.float32} | options
    options |= {"config": config, "output_loading_info": True}
    net, report = load_local_or_hub(setting, name, model_class.from_pretrained, **options)
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"{setting}: {name} lacks {len(missing)} weights of a "
            f"{config.model_type}, first {missing[0]}"
        )
    # transformers freezes them in a model that it builds, such as of a resumed run.
    for name, weight in net.named_parameters():
        if name.endswith(SINUSOIDS):
            weight.requires_grad_(False)
    return net


def build_hf_encoder(setting: str, name: str | None, config: PreTrainedConfig) -> Any:
    """Build an encoder of transformers without a pooler, with the weights in a folder or on the
    hub; None: random ones.
    """
    from transformers import AutoModel

    options = {"add_pooling_layer": False} if config.model_type in HAVE_POOLER_OPTION else {}
    if name is None:
        return AutoModel.from_config(config, **options)
    return load_pretrained(setting, name, AutoModel, config, **options)


def check_vocab_size(setting: str, weights: str, rows: int, vocab_size: int) -> None:
    """Check that a pretrained token embedding has a row for each token of the tokenizer.

    Raises:
        UsageError: It has too few rows.
    """
    if rows < vocab_size:
        raise UsageError(
            f"{setting}: {weights} has {rows} embedding rows, too few for a tokenizer of "
            f"{vocab_size} tokens; use the tokenizer of the weights (model.inputs.tokenizer)"
        )


def transformer_config(part: Transformer) -> dict[str, Any]:
    """Return the config values of transformers for an encoder section.

    Returns:
        `hidden_size`, `num_hidden_layers`, `num_attention_heads` and `intermediate_size` (4 x
        width).
    """
    return {
        "hidden_size": part.width,
        "num_hidden_layers": part.depth,
        "num_attention_heads": part.heads,
        "intermediate_size": 4 * part.width,
    }
