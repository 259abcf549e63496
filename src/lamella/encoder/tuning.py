"""What of the encoder is trained: each way is a function that edits the encoder in place before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from lamella import registry
from lamella.encoder.adapters import Adapter, insert_adapter
from lamella.encoder.encoder import Encoder
from lamella.errors import ConfigError, MissingExtraError
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


@register("tuning", "frozen")
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


@register("tuning", "lora")
def lora(
    encoder: Encoder,
    *,
    rank: Positive = 8,
    alpha: Positive = 16,
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    targets: Projections = ("query", "value"),
    also: Sequence[Small] = (),
) -> None:
    """LoRA (through peft): W + alpha/rank · B · A on the chosen projections; starts exactly unchanged.

    `also` trains every LayerNorm, every bias, or what tells question and context apart, as well. What an earlier run's
    LoRA or IA³ learnt is first merged into the weights it stands on.
    """
    peft = _peft("tuning 'lora'")
    _refuse_absent(encoder, also)
    merge(encoder)
    _inject(
        encoder,
        peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=_paths(encoder, targets)),
    )
    _train_small(encoder, also)


@register("tuning", "ia3")
def ia3(encoder: Encoder, *, targets: Projections = ("key", "value", "ffn_output")) -> None:
    """IA³ (through peft): a learned factor for each output of the chosen projections (each input of ffn_output).

    What an earlier run's LoRA or IA³ learnt is first merged into the weights it stands on.
    """
    peft = _peft("tuning 'ia3'")
    merge(encoder)
    feedforward = _paths(encoder, [target for target in targets if target == "ffn_output"])
    _inject(encoder, peft.IA3Config(target_modules=_paths(encoder, targets), feedforward_modules=feedforward))


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


def merge(encoder: Encoder) -> list[nn.Module]:
    """Make plain layers again of those that peft wrapped, with what was learnt in their weights; gives these layers.

    A second injection by peft would start with the first one lost.
    """
    if not hasattr(encoder.model, "peft_config"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrapped = {name: module for name, module in encoder.model.named_modules() if isinstance(module, BaseTunerLayer)}
    _refuse_adapted(wrapped)
    for name, module in wrapped.items():
        module.merge()
        encoder.model.set_submodule(name, module.get_base_layer())
    del encoder.model.peft_config
    return [module.get_base_layer() for module in wrapped.values()]


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


def _peft(feature: str) -> Any:
    try:
        import peft
    except ModuleNotFoundError:
        raise MissingExtraError(feature, "lora") from None
    return peft


def _paths(encoder: Encoder, targets: Sequence[Projection]) -> list[str]:
    """The full names of some projections in every layer. peft's own guesses by family fail on ALBERT."""
    wanted = {
        id(layer.get_submodule(encoder.family.projections[one])) for layer in encoder.layer_modules for one in targets
    }
    found = {name: module for name, module in encoder.model.named_modules() if id(module) in wanted}
    _refuse_adapted(found)
    return list(found)


def _refuse_adapted(projections: Mapping[str, Any]) -> None:
    """An adapter behind a linear layer (ALBERT, DistilBERT) would end up inside what peft wraps, or be lost with it."""
    adapted = [
        name for name, module in projections.items() if any(isinstance(one, Adapter) for one in module.children())
    ]
    if adapted:
        raise ConfigError(
            "encoder.tuning", [f"{adapted[0]} carries an earlier run's adapter: LoRA and IA³ cannot be put on it too."]
        )


def _inject(encoder: Encoder, config: Any) -> None:
    from peft import inject_adapter_in_model

    encoder.requires_grad_(False)
    inject_adapter_in_model(config, encoder.model)
