"""Which tensors a tuning trains, by name: a saved model that lacks one of them is damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lamella.graph.encoder_config import EncoderConfig

NORMS = ("LayerNorm", "layer_norm")
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
CHANGES = {"lora": ("lora.A", "lora.B"), "ia3": ("ia3.factor",)}
ADAPTER_PARTS = ("down.weight", "down.bias", "up.weight", "up.bias")


def missing_tensor(
    delta: Mapping[str, Any], encoder: Sequence[str], tunings: Sequence[Mapping[str, Any]], config: EncoderConfig
) -> str | None:
    """Return the name of a tensor that the tunings trained and that `delta` lacks; None if it has all of them.

    `encoder` are the names of the encoder's own parameters. The pooler is left out, as not every model has it, and so
    are the adapters of a base model, of which only a tuning of whole layers trains some.
    """
    *earlier, last = tunings
    sites: Counter[str] = Counter()  # how many adapters each has
    sites.update(name.partition(".adapter")[0] for name in encoder if name.endswith(ADAPTER_PARTS[0]))
    required = [name for tuning in earlier for name in _added(tuning, config, sites, merged=True)]
    required += _added(last, config, sites, merged=False)
    for name in encoder:
        if (
            not name.startswith("pooler.")
            and ".adapter" not in name
            and any(_is_trained(name, tuning, config) for tuning in tunings)
        ):
            required.append(name)
    return next((name for name in required if name not in delta), None)


def _added(tuning: Mapping[str, Any], config: EncoderConfig, sites: Counter[str], *, merged: bool) -> Iterator[str]:
    """Yield the names of what a tuning adds to the encoder; or, once it is merged, of the weights that it changed."""
    name, family = tuning["name"], config.family
    for number, layer in enumerate(config.layer_paths, start=1):
        if name == "adapter" and number not in tuning["leave_out"]:
            for site in (f"{layer}.{family.attention_site}", f"{layer}.{family.ffn_site}"):
                sites[site] += 1
                adapter = "adapter" if sites[site] == 1 else f"adapter_{sites[site]}"
                yield from (f"{site}.{adapter}.{part}" for part in ADAPTER_PARTS)
        for target in tuning["targets"] if name in CHANGES else ():
            path = f"{layer}.{family.projections[target]}"
            yield from (f"{path}.{part}" for part in (("weight", "bias") if merged else CHANGES[name]))


def _is_trained(name: str, tuning: Mapping[str, Any], config: EncoderConfig) -> bool:
    """Return whether a tuning trains this parameter of the encoder itself."""
    kind, also = tuning["name"], tuning.get("also", ())
    if kind == "full":
        return True
    if any(norm in name for norm in NORMS) and (kind in ("layer_norm", "top_k", "adapter") or "layer_norm" in also):
        return True
    if name.endswith(".bias") and (kind == "bitfit" or "bias" in also):
        return True
    if name == TOKEN_TYPES and "token_types" in also:
        return True
    top = tuning.get("k", 0) if kind in ("top_k", "adapter") else 0
    layers = config.layer_paths
    return top == len(layers) or name.startswith(tuple(f"{path}." for path in layers[len(layers) - top :]))
