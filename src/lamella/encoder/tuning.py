"""What of the encoder is trained: each way is a function that edits the encoder in place before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from torch import nn

from lamella import registry
from lamella.encoder.adapters import Adapter, insert_adapter
from lamella.encoder.encoder import Encoder
from lamella.encoder.lora import Ia3, Lora, insert, layers_with, merge_into
from lamella.errors import ConfigError
from lamella.registry import register

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Projection = Literal["query", "key", "value", "attention_output", "ffn_input", "ffn_output"]
Projections = Annotated[Sequence[Projection], Field(min_length=1)]
Small = Literal["layer_norm", "bias", "token_types"]  # parts of a few vectors


@register("tuning", "full")
def full(encoder: Encoder) -> None:
    """Train every weight of the encoder."""
    encoder.requires_grad_(True)


@register("tuning", "frozen", trains_encoder=False)
def frozen(encoder: Encoder) -> None:
    """Train nothing of the encoder; only the head learns."""
    encoder.requires_grad_(False)


@register("tuning", "top_k")
def top_k(encoder: Encoder, *, k: Count = 1) -> None:
    """Train the top k layers and every LayerNorm (Hulburd's Lk); at k = all layers the embeddings too.

    In the paper "frozen" layers still train their LayerNorms, and the embeddings train only when all layers do. What an
    earlier run put into a layer (adapters, LoRA) is part of that layer: on top it is trained, below it is not.
    """
    layers = encoder.layer_modules
    if encoder.family.shared_layers:
        raise ConfigError(
            "encoder.tuning", ["top_k: this encoder uses one layer's weights at every depth, so none is on top."]
        )
    if k > len(layers):
        raise ConfigError("encoder.tuning.k", [f"expected at most {len(layers)}, the encoder's layers. Got {k}."])
    encoder.requires_grad_(k == len(layers))
    for layer in layers[len(layers) - k :]:
        layer.requires_grad_(True)
    _train_layer_norms(encoder)


@register("tuning", "adapter")
def adapter(
    encoder: Encoder,
    *,
    size: Positive = 64,
    leave_out: Sequence[Count] = (),
    k: Count = 0,
    zero: bool = False,
    also: Sequence[Small] = (),
) -> None:
    """Houlsby's bottleneck adapters, two a layer, and every LayerNorm; `k` trains the top k layers as well.

    An adapter stands behind the attention's and behind the feed-forward's output, before the sum and the LayerNorm:
    LayerNorm(adapter(f(x)) + x). `leave_out` names layers without adapters, counted from 1 at the bottom. `zero`
    starts from exactly the pretrained encoder. `also` trains every bias, or what tells question and context apart, as
    well. A shared layer (ALBERT) has one pair for all depths. An earlier run's adapters stay in front of the new ones,
    and are trained again only with a layer that `k` puts on top.
    """
    layers = encoder.layer_modules
    _refuse_absent(encoder, also)
    if encoder.family.shared_layers and leave_out:
        raise ConfigError(
            "encoder.tuning.leave_out", ["this encoder uses one layer's weights at every depth: none can be left out."]
        )
    unknown = [layer for layer in leave_out if not 1 <= layer <= len(layers)]
    if unknown:
        raise ConfigError("encoder.tuning.leave_out", [f"expected layers from 1 to {len(layers)}. Got {unknown}."])
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
) -> None:
    """LoRA: W + alpha/rank · B · A on the chosen projections; starts exactly unchanged.

    `also` trains every LayerNorm, every bias, or what tells question and context apart, as well. What an earlier run's
    LoRA or IA³ learnt is first merged into the weights it stands on.
    """
    _refuse_absent(encoder, also)
    merge(encoder)
    layers = _projections(encoder, targets)
    encoder.requires_grad_(False)
    for layer, _ in layers:
        insert(layer, Lora(layer, rank=rank, alpha=alpha, dropout=dropout))
    _train_small(encoder, also)


@register("tuning", "ia3")
def ia3(encoder: Encoder, *, targets: Projections = ("key", "value", "ffn_output")) -> None:
    """IA³: a learned factor for each output of the chosen projections (each input of ffn_output).

    What an earlier run's LoRA or IA³ learnt is first merged into the weights it stands on.
    """
    merge(encoder)
    layers = _projections(encoder, targets)
    encoder.requires_grad_(False)
    for layer, target in layers:
        insert(layer, Ia3(layer, inputs=target == "ffn_output"))


@register("tuning", "bitfit")
def bitfit(encoder: Encoder) -> None:
    """Train the biases alone (BitFit), those of the LayerNorms among them."""
    encoder.requires_grad_(False)
    _train_biases(encoder)


@register("tuning", "layer_norm")
def layer_norm(encoder: Encoder) -> None:
    """Train the LayerNorms alone."""
    encoder.requires_grad_(False)
    _train_layer_norms(encoder)


def tune_in_turn(encoder: Encoder, tunings: Sequence[Mapping[str, Any]]) -> None:
    """Tune an encoder as a chain of models did, one on the other; what any of them changed can then be trained.

    Between two of them LoRA and IA³ are merged, as they are when a model becomes the base of another: of an encoder
    that has learnt nothing yet this changes no weight, but those that it *would* change belong to the changed ones.
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
    """Put what LoRA or IA³ learnt into the weights of their layers, which are plain ones again; gives these layers."""
    layers = list(layers_with(encoder.model).values())
    for layer in layers:
        merge_into(layer)
    return layers


def trainable_line(module: nn.Module) -> str:
    """The count of trainable parameters, in the form that users of peft know."""
    trainable, total = count_parameters(module)
    return f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}"


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """How many are trainable, and how many there are."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)


def _train_small(encoder: Encoder, parts: Sequence[Small]) -> None:
    """Train some parts of a few vectors beside what is trained already."""
    if "layer_norm" in parts:
        _train_layer_norms(encoder)
    if "bias" in parts:
        _train_biases(encoder)
    if "token_types" in parts:
        encoder.model.get_submodule("embeddings.token_type_embeddings").requires_grad_(True)


def _refuse_absent(encoder: Encoder, parts: Sequence[Small]) -> None:
    if "token_types" in parts and not encoder.family.token_types:
        raise ConfigError(
            "encoder.tuning.also",
            ["token_types: this encoder has none; it tells question and context apart by what stands between them."],
        )


def _train_layer_norms(encoder: Encoder) -> None:
    for module in encoder.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)


def _train_biases(encoder: Encoder) -> None:
    for name, parameter in encoder.named_parameters():
        if name.endswith(".bias"):
            parameter.requires_grad_(True)


def _projections(encoder: Encoder, targets: Sequence[Projection]) -> list[tuple[nn.Linear, Projection]]:
    """Some projections of every layer.

    An adapter behind such a layer itself (ALBERT, DistilBERT) is refused: it must come after what is put there.
    """
    found: list[tuple[nn.Linear, Projection]] = []
    for number, layer in enumerate(encoder.layer_modules, start=1):
        for target in dict.fromkeys(targets):
            projection = cast(nn.Linear, layer.get_submodule(encoder.family.projections[target]))
            if any(isinstance(one, Adapter) for one in projection.children()):
                raise ConfigError(
                    "encoder.tuning",
                    [f"{target} of layer {number} has an earlier run's adapter: LoRA and IA³ cannot be put there too."],
                )
            found.append((projection, target))
    return found
