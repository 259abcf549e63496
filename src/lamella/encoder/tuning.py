"""Tunings: functions that edit the encoder in place before training, and so choose what is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from torch import nn

from lamella import registry
from lamella.encoder.adapters import Adapter, insert_adapter
from lamella.encoder.encoder import Encoder
from lamella.encoder.families import Fused
from lamella.encoder.lora import Ia3, Lora, Part, changed_layers, insert_change, merge_changes
from lamella.errors import ConfigError
from lamella.registry import ADDED_LATER, register

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Projection = Literal["query", "key", "value", "attention_output", "ffn_input", "ffn_output"]
Projections = Annotated[Sequence[Projection], Field(min_length=1)]
Small = Literal["layer_norm", "bias", "token_types"]  # parameters that are only a few vectors


@register("tuning", "full")
def full(encoder: Encoder) -> None:
    """Train every weight of the encoder."""
    encoder.requires_grad_(True)


@register("tuning", "frozen", trains_encoder=False)
def frozen(encoder: Encoder) -> None:
    """Train only the head; the encoder stays as it is."""
    encoder.requires_grad_(False)


@register("tuning", "top_k", top_layers="k")
def top_k(encoder: Encoder, *, k: Count = 1) -> None:
    """Train the top k layers and every LayerNorm (Hulburd's Lk); if k is all layers, the embeddings too.

    In the paper, "frozen" layers still train their LayerNorms, and the embeddings are trained only with all layers.
    Adapters and LoRA of an earlier run belong to their layer: trained in the top layers, frozen below.
    """
    layers = encoder.layer_modules
    if encoder.family.shared_layers:
        raise ConfigError(
            "encoder.tuning",
            ["top_k: this encoder shares one layer's weights at every depth, so it has no top layers; choose another."],
        )
    if k > len(layers):
        raise ConfigError("encoder.tuning.k", [f"expected at most {len(layers)}, the number of layers; got {k}."])
    encoder.requires_grad_(k == len(layers))
    for layer in layers[len(layers) - k :]:
        layer.requires_grad_(True)
    _train_layer_norms(encoder)


@register("tuning", "adapter", top_layers="k")
def adapter(
    encoder: Encoder,
    *,
    size: Positive = 64,
    leave_out: Sequence[Count] = (),
    k: Count = 0,
    zero: bool = False,
    also: Sequence[Small] = (),
) -> None:
    """Train bottleneck adapters (Houlsby), two per layer, and every LayerNorm; `k` also trains the top k layers.

    One adapter follows the attention and one the feed-forward part, before the residual sum and the LayerNorm:
    LayerNorm(adapter(f(x)) + x). `leave_out` lists layers without adapters, counted from 1 at the bottom. `zero` starts
    from exactly the pretrained encoder. `also` trains every bias, or the token type embeddings, as well. A shared layer
    (ALBERT) has one pair of adapters for all depths. Adapters of an earlier run stay in front of the new ones, and are
    trained only in the top k layers.
    """
    layers = encoder.layer_modules
    _check_present(encoder, also)
    if encoder.family.shared_layers and leave_out:
        raise ConfigError(
            "encoder.tuning.leave_out",
            [f"expected an empty list, as this encoder shares one layer's weights at every depth; got {leave_out}."],
        )
    unknown = [layer for layer in leave_out if not 1 <= layer <= len(layers)]
    if unknown:
        raise ConfigError("encoder.tuning.leave_out", [f"expected layers from 1 to {len(layers)}, got {unknown}."])
    if k:
        top_k(encoder, k=k)
    else:
        encoder.requires_grad_(False)
        _train_layer_norms(encoder)
    for number, layer in enumerate(layers, start=1):
        if number not in leave_out:
            for site in (encoder.family.attention_site, encoder.family.ffn_site):
                insert_adapter(layer.get_submodule(site), Adapter(encoder.hidden_size, size, zero=zero))
    _train_small(encoder, also)


@register("tuning", "lora", low_rank=True)
def lora(
    encoder: Encoder,
    *,
    rank: Positive = 8,
    alpha: Positive = 16,
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    targets: Projections = ("query", "value"),
    also: Sequence[Small] = (),
    rslora: Annotated[bool, ADDED_LATER] = False,
    dora: Annotated[bool, ADDED_LATER] = False,
    init: Annotated[Literal["zero", "pissa"], ADDED_LATER] = "zero",
    b_learning_rate_ratio: Annotated[float, Field(gt=0), ADDED_LATER] = 1.0,
) -> None:
    """Train LoRA, W + alpha/rank · B · A, on the chosen projections; starts exactly unchanged.

    `also` trains every LayerNorm, every bias, or the token type embeddings, as well. LoRA or IA³ of an earlier run is
    first merged into the weights.

    `rslora` divides alpha by √rank instead of rank (rsLoRA). `dora` adds a change of length for each output (DoRA).
    `init = "pissa"` trains the part of the weights with the largest singular values instead of a part that starts as
    zero (PiSSA). `b_learning_rate_ratio` multiplies the learning rate of B (LoRA+).
    """
    _check_present(encoder, also)
    merge(encoder)
    layers = _projections(encoder, targets)
    if init == "pissa" and rank > (largest := min(min(layer.weight.shape) for layer, _ in layers)):
        raise ConfigError(
            "encoder.tuning.rank", [f"expected at most {largest}, the rank of these weights, for pissa; got {rank}."]
        )
    encoder.requires_grad_(False)
    for layer, _ in layers:
        change = Lora(
            layer,
            rank=rank,
            alpha=alpha,
            dropout=dropout,
            rslora=rslora,
            dora=dora,
            pissa=init == "pissa",
            b_learning_rate_ratio=b_learning_rate_ratio,
        )
        insert_change(layer, change)
    _train_small(encoder, also)


@register("tuning", "ia3")
def ia3(encoder: Encoder, *, targets: Projections = ("key", "value", "ffn_output")) -> None:
    """Train IA³: a factor for each output of the chosen projections (each input of ffn_output).

    LoRA or IA³ of an earlier run is first merged into the weights.
    """
    merge(encoder)
    layers = _projections(encoder, targets)
    encoder.requires_grad_(False)
    for layer, target in layers:
        insert_change(layer, Ia3(layer, inputs=target == "ffn_output"))


@register("tuning", "bitfit")
def bitfit(encoder: Encoder) -> None:
    """Train only the biases (BitFit), also in the LayerNorms."""
    if not _biases(encoder):
        raise ConfigError("encoder.tuning", ["bitfit: this encoder has no biases; choose another."])
    encoder.requires_grad_(False)
    _train_biases(encoder)


@register("tuning", "layer_norm")
def layer_norm(encoder: Encoder) -> None:
    """Train only the LayerNorms."""
    encoder.requires_grad_(False)
    _train_layer_norms(encoder)


def tune_in_turn(encoder: Encoder, tunings: Sequence[Mapping[str, Any]]) -> None:
    """Apply the tunings of a chain of models in order; everything that any of them trains becomes trainable.

    LoRA and IA³ are merged between two tunings, as when a model becomes the base of another. On an untrained encoder
    merging changes no value, but the weights that it *would* change become trainable too.
    """
    *earlier, last = tunings
    changed: list[nn.Parameter] = []
    for tuning in earlier:
        registry.build("tuning", tuning, encoder)
        changed += [parameter for parameter in encoder.parameters() if parameter.requires_grad]
        changed += [parameter for layer in merge(encoder) for parameter in layer.parameters()]
    registry.build("tuning", last, encoder)
    for parameter in changed:
        parameter.requires_grad_(True)


def merge(encoder: Encoder) -> list[nn.Linear]:
    """Merge all LoRA and IA³ into the weights and return the layers that had them, which are plain layers again."""
    layers = list(changed_layers(encoder.model).values())
    for layer in layers:
        merge_changes(layer)
    return layers


def linears_of(encoder: Encoder, layer: nn.Module, target: str) -> list[nn.Linear | Part]:
    """Return the linear layer of a projection: a part of one (ModernBERT's query), or two (EuroBERT's ffn_input)."""
    place = encoder.family.projections[target]
    if isinstance(place, Fused):
        fused = cast(nn.Linear, layer.get_submodule(place.path))
        size = fused.out_features // place.parts
        return [Part(fused, target, place.part * size, (place.part + 1) * size)]
    paths = (place,) if isinstance(place, str) else place
    return [cast(nn.Linear, layer.get_submodule(path)) for path in paths]


def group_parameters(encoder: Encoder) -> dict[str, tuple[str, ...]]:
    """Return the groups of each parameter of the model inside an encoder, by the parameter's name.

    A group is named as in the options `targets` and `also` of LoRA; parameters that neither can name are grouped by
    their module, such as `word_embeddings`. Only a weight that computes several projections has several groups.
    """
    modules = dict(encoder.model.named_modules())
    projections: dict[nn.Module, tuple[str, ...]] = {}
    for layer in encoder.layer_modules:
        for target in encoder.family.projections:
            for linear in linears_of(encoder, layer, target):
                module = linear.layer if isinstance(linear, Part) else linear
                projections[module] = (*projections.get(module, ()), target)
    groups: dict[str, tuple[str, ...]] = {}
    for name, _ in encoder.model.named_parameters():
        path, _, kind = name.rpartition(".")
        module = modules[path]
        if _is_norm(module):
            groups[name] = ("layer_norm",)
        elif kind == "bias":
            groups[name] = ("bias",)
        elif module in projections:
            groups[name] = projections[module]
        elif path.endswith("token_type_embeddings"):
            groups[name] = ("token_types",)
        else:
            groups[name] = (path.rpartition(".")[2],)
    return groups


def trainable_line(module: nn.Module) -> str:
    """Return the line with the number of trainable parameters, in the form that peft prints."""
    trainable, total = count_parameters(module)
    return f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}"


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Return the number of trainable parameters and the number of all parameters."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)


def _train_small(encoder: Encoder, parts: Sequence[Small]) -> None:
    """Make some small groups of parameters trainable as well."""
    if "layer_norm" in parts:
        _train_layer_norms(encoder)
    if "bias" in parts:
        _train_biases(encoder)
    if "token_types" in parts:
        encoder.model.get_submodule("embeddings.token_type_embeddings").requires_grad_(True)


def _check_present(encoder: Encoder, parts: Sequence[Small]) -> None:
    if "token_types" in parts and not encoder.token_types:
        raise ConfigError(
            "encoder.tuning.also",
            ["token_types: this encoder has no token type embeddings; remove it from the list."],
        )
    if "bias" in parts and not _biases(encoder):
        raise ConfigError("encoder.tuning.also", ["bias: this encoder has no biases; remove it from the list."])


def _train_layer_norms(encoder: Encoder) -> None:
    for module in encoder.modules():
        if _is_norm(module):
            module.requires_grad_(True)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a LayerNorm, or an RMSNorm, which transformers defines anew for every family."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")


def _train_biases(encoder: Encoder) -> None:
    for parameter in _biases(encoder):
        parameter.requires_grad_(True)


def _biases(encoder: Encoder) -> list[nn.Parameter]:
    return [parameter for name, parameter in encoder.named_parameters() if name.endswith(".bias")]


def _projections(encoder: Encoder, targets: Sequence[Projection]) -> list[tuple[nn.Linear | Part, Projection]]:
    """Return the chosen projections of every layer.

    A projection that has an adapter itself (ALBERT, DistilBERT) is an error: the adapter would have to come last.
    """
    projections: list[tuple[nn.Linear | Part, Projection]] = []
    for number, layer in enumerate(encoder.layer_modules, start=1):
        for target in dict.fromkeys(targets):
            for linear in linears_of(encoder, layer, target):
                module = linear.layer if isinstance(linear, Part) else linear
                if any(isinstance(child, Adapter) for child in module.children()):
                    problem = f"{target} of layer {number} has an adapter of an earlier run"
                    raise ConfigError("encoder.tuning", [f"{problem}; choose targets without adapters."])
                projections.append((linear, target))
    return projections
