"""Low-rank adapters (LoRA) through peft: added to a built model, merged into its weights at export.

A checkpoint of a run that started from `model.weights` has only what trains, and the digest of the
frozen weights, which are read from `model.weights` again. Source: Hu et al. 2021
(arXiv:2106.09685).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mmray.data.vlm.families import has_weights
from mmray.errors import UsageError, suggest
from mmray.models.protocol import as_model
from mmray.models.weights import save_weights
from mmray.plugins import check_installed
from mmray.storage.requests import iter_parallel

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

    from mmray.config import Lora
    from mmray.config import Model as ModelConfig

ADAPTERS = "adapter_model.safetensors"
# Parts of a checkpoint with weights, and the prefix of their names: the model, and its EMA.
STATE_PARTS = {"model": "", "average": "module."}


class FrozenBase(NamedTuple):
    """Frozen weights of a model with adapters, which its checkpoints leave out; `frozen_base`
    computes it.

    `remove_from(state)` and `add_to(state, model)` drop and restore them in the state of a
    checkpoint; `check(saved)` raises UsageError if the digest of a checkpoint differs.

    Attributes:
        weights: The setting `model.weights`, from which they are read.
        sha256: Hex digest of the frozen weights.
        names: Their names in the state dict.
    """

    weights: str
    sha256: str
    names: frozenset[str]

    @property
    def identity(self) -> dict[str, str]:
        """{"weights": the setting `model.weights`, "sha256": hex digest of the frozen weights},
        which meta.json of a checkpoint has as `base`.
        """
        return {"weights": self.weights, "sha256": self.sha256}

    def check(self, saved: Mapping[str, str]) -> None:
        """Raise UsageError if `base` in a checkpoint's meta.json has another digest."""
        if self.sha256 != saved["sha256"]:
            raise UsageError(
                f"model.weights: the weights in {self.weights} are not those that the run started "
                f"with ({saved['weights']}), which its checkpoints do not contain. Restore the "
                "files, or start a new run (another --run.name)"
            )

    def remove_from(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a checkpoint without the frozen weights."""
        kept = dict(state)
        for part, prefix in STATE_PARTS.items():
            left_out = {f"{prefix}{name}" for name in self.names}
            if part in state:
                kept[part] = {
                    name: each for name, each in state[part].items() if name not in left_out
                }
        return kept

    def add_to(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Add the frozen weights to the state of a checkpoint that was saved without them."""
        own = model.state_dict()
        for part, prefix in STATE_PARTS.items():
            if part in state:
                state[part].update({f"{prefix}{name}": own[name] for name in self.names})


def starts_from_files(spec: ModelConfig) -> bool:
    """Return whether all weights that a run started with are in the files of `model.weights`."""
    weights = spec.initial_weights
    return weights != "none" and (spec.kind != "vlm" or has_weights(weights))


def leaves_out_base(spec: ModelConfig) -> bool:
    """Return whether checkpoints of a run leave out the frozen weights: the model has adapters, and
    `model.weights` has all of them.
    """
    return bool(spec.lora.rank) and starts_from_files(spec)


def frozen_base(model: nn.Module, weights: str) -> FrozenBase:
    """Return the identity of the frozen weights of a built model on the CPU; 1 to 2 s a GB."""
    frozen = {
        name: weight
        for name, weight in model.named_parameters(remove_duplicate=False)
        if not weight.requires_grad
    }
    return FrozenBase(weights, _hash_tensors(frozen), frozenset(frozen))


def hash_weights(model: nn.Module) -> str:
    """Return a hex digest of the weights of a model on the CPU without its adapters, the same with
    and without them.
    """
    return _hash_tensors(
        {
            name.replace(".base_layer.", "."): weight
            for name, weight in model.named_parameters()
            if ".lora_" not in name
        }
    )


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    def digest(name: str) -> str:
        weight = tensors[name].detach().contiguous()
        data = weight.reshape(-1).view(torch.uint8).numpy().data
        return f"{name} {weight.dtype} {tuple(weight.shape)} {hashlib.sha256(data).hexdigest()}\n"

    # Hashing releases the interpreter's lock.
    lines = "".join(iter_parallel(digest, sorted(tensors)))
    return hashlib.sha256(lines.encode()).hexdigest()


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Add LoRA adapters to the linear layers that match a pattern, and freeze all other weights.

    In a vision-language model only layers of the language model get adapters, except the output
    layer, and those of the encoders that `lora.encoder_targets` names. The projector stays
    trainable. So do the weights that `lora.train` names.

    Args:
        model: Changed in place; a new adapter adds zero to the outputs of its layer. With
            `lora.load_in_4bit` its frozen linear layers are quantized when it is moved to a device.
        lora: The `model.lora` section: `rank`, `alpha`, `targets`, patterns of layer names such as
            `*.q_proj`, and `train`, names of modules or patterns of weights that are trained fully,
            separated by `|`. Frozen layers get no adapter.

    Raises:
        UsageError: A pattern matches no trainable layer or weight, or a package is not installed.
    """
    check_installed("peft", "model.lora.rank", "lora")
    from peft import LoraConfig, inject_adapter_in_model

    parts = as_model(model).parameter_parts()
    # The loss reads its weight without calling it.
    output_layer = model.net.get_output_embeddings() if parts else None  # type: ignore[union-attr,operator]
    trained = [
        weight
        for weight in map(model.get_parameter, parts.get("projector", ()))
        if weight.requires_grad
    ]
    trained += _trained_weights(model, lora.train)
    linear = [
        name
        for name, part in model.named_modules()
        # nn.MultiheadAttention reads the weight of its output layer without calling it, so an
        # adapter had no effect.
        if isinstance(part, nn.Linear) and not isinstance(part, NonDynamicallyQuantizableLinear)
        if part.weight.requires_grad and part is not output_layer
    ]
    inside = {part: {name.rpartition(".")[0] for name in names} for part, names in parts.items()}
    language = inside.pop("language", {*linear})
    inside.pop("projector", None)
    layers = _matching_layers(
        "targets", lora.targets, [name for name in linear if name in language]
    )
    in_encoders = [name for name in linear if any(name in names for names in inside.values())]
    layers += _matching_layers("encoder_targets", lora.encoder_targets, in_encoders)
    if lora.load_in_4bit:
        check_installed("bitsandbytes", "model.lora.load_in_4bit", "bitsandbytes")
        from mmray.models.four_bits import quantize_linear_layers

        quantize_linear_layers(model, {id(each) for each in (*trained, output_layer)})
        model.is_loaded_in_4bit = True  # type: ignore[assignment]  # read by peft
    inject_adapter_in_model(
        LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=layers), model
    )
    for weight in trained:
        weight.requires_grad_(True)


def _matching_layers(setting: str, patterns: Sequence[str], names: list[str]) -> list[str]:
    """Return the names that patterns match, each at least one."""
    layers: list[str] = []
    for pattern in patterns:
        if not (matching := [name for name in names if fnmatchcase(name, pattern)]):
            raise UsageError(
                f"model.lora.{setting}: `{pattern}` matches no linear layer of the model; "
                f"trainable ones are {', '.join(names[:3]) or 'none'}"
            )
        layers += matching
    return layers


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield the layers of a model that have adapters, with their names."""
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            yield name, layer


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Scope in which the layers of a model compute without their adapters."""
    # `enable_adapters` of peft would also change `requires_grad`.
    for _, layer in adapted_layers(model):
        layer._disable_adapters = True
    try:
        yield
    finally:
        for _, layer in adapted_layers(model):
            layer._disable_adapters = False


def check_only_adapters(model: nn.Module) -> None:
    """Raise UsageError if a model trains other weights than adapters, so that without its adapters
    it would not be the one that the run started with.
    """
    others = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and ".lora_" not in name
    ]
    if others:
        raise UsageError(
            f"objective.reference adapters_off: {', '.join(others[:3])} are trained fully, so the "
            "model without its adapters is no fixed reference. Freeze them (--optimizer.freeze "
            "projector), or score the set and leave out --objective.reference"
        )


def _trained_weights(model: nn.Module, patterns: str) -> list[nn.Parameter]:
    """Return the trainable weights that a text such as `project|head` names."""
    weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
    selected = []
    for pattern in filter(None, (part.strip() for part in patterns.split("|"))):
        matching = [
            weight
            for name, weight in weights.items()
            if pattern in name.split(".") or fnmatchcase(name, pattern)
        ]
        if not matching:
            parts = {part for name in weights for part in name.split(".") if not part.isdigit()}
            raise UsageError(
                f"model.lora.train: `{pattern}` matches no trainable weight; "
                f"{suggest(pattern, sorted(parts))}"
            )
        selected += matching
    return selected


def save_adapters(
    net: nn.Module,
    lora: Mapping[str, Any],
    base: str,
    folder: Path,
    rename: Callable[[str], str] = str,
) -> None:
    """Write the adapters and the fully trained layers of a model as peft does.

    peft's own save needs a PeftModel, which wraps fully trained modules: the weights of checkpoints
    would get other names.

    Args:
        net: The model with adapters.
        lora: The `model.lora` section as JSON values: `rank`, `alpha`, `targets` and `train`.
        base: Folder or hub name of the weights that the run started with.
        folder: Receives adapter_config.json and adapter_model.safetensors.
        rename: Called with the name of a weight or module of `net`; returns its name in
            transformers.

    Raises:
        UsageError: A trained weight is not one of a module that is trained as a whole, so peft
            cannot save it.
    """
    from peft import LoraConfig

    trained = [name for name, weight in net.named_parameters() if weight.requires_grad]
    adapters = [name for name in trained if ".lora_" in name]
    others = {name for name in trained if ".lora_" not in name}
    # peft saves whole modules, by name, and not a module inside another one that it saves.
    parents = sorted({name.rpartition(".")[0] for name in others})
    modules = [
        name for name in parents if not any(name.startswith(f"{other}.") for other in parents)
    ]
    for module in modules:
        part = net.get_submodule(module)
        names = {f"{module}.{name}" for name, _ in part.named_parameters()}
        if not module or not names <= others:
            bare = ", ".join(sorted(name for name in others if name.rpartition(".")[0] == module))
            raise UsageError(
                f"--adapters: peft cannot save {bare} of this model; export the merged model, "
                "without --adapters"
            )
    # With each name of a tied weight, which peft looks up.
    weights: dict[str, Tensor] = {
        _peft_name(rename(name)): weight
        for name, weight in net.named_parameters(remove_duplicate=False)
        if weight.requires_grad
    }
    LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        target_modules=sorted({rename(name.partition(".lora_")[0]) for name in adapters}),
        modules_to_save=[rename(f"{module}.").rstrip(".") for module in modules] or None,
        base_model_name_or_path=base,
        # Otherwise the output layer keeps the embedding of the base.
        ensure_weight_tying=len(weights) > len(trained),
    ).save_pretrained(str(folder))
    save_weights(weights, folder / ADAPTERS)


def load_adapters(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load what `save_adapters` wrote into a model of transformers with the same adapters."""
    own = net.named_parameters(remove_duplicate=False)
    names = {_peft_name(name): name for name, _ in own}
    net.load_state_dict({names[name]: each for name, each in weights.items()}, strict=False)


def _peft_name(name: str) -> str:
    """Return the name that peft gives to a weight of the transformers model."""
    return "base_model.model." + name.replace(".default.", ".")


def merge_adapters(model: nn.Module) -> nn.Module:
    """Add the LoRA adapters to the weights of their layers, and remove them, in place."""
    for name, layer in list(adapted_layers(model)):
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())
    return model
