"""The work that a benchmark cannot avoid, from which the floor of its time follows.

A benchmark writes its `work` for one unit of `ours`: for the whole if `ours` is a time, for one item if `ours` is a
rate or a time per item. It holds any of

- `flops`: floating-point operations of the matrix products, with their `precision`;
- `bytes`: bytes that must pass through memory;
- `starts`: Python processes to start;
- `seconds`: a floor that the benchmark measured itself;

and the `threads` that may share it, and `of`: what was counted, in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lamella.config import DEFAULT_ENCODER, WindowOptions
from lamella.data.examples import Context, Example
from lamella.encoder.sources import find_encoder
from lamella.files import read_json

Json = dict[str, Any]


def floor(result: Json, limits: Json) -> Json:
    """Return the floor of a benchmark in the unit of `ours`, and the share of our time that it makes up."""
    work, ours, unit = result["work"], result["ours"], result["unit"]
    seconds = least_seconds(work, limits)
    if unit.endswith("/s"):
        return {"floor": 1 / seconds, "share": ours * seconds}
    scale = 1000 if "ms" in unit.split() else 1
    return {"floor": scale * seconds, "share": scale * seconds / ours}


def least_seconds(work: Json, limits: Json) -> float:
    """Return the seconds that the work takes at the limits of the machine; products and memory traffic overlap."""
    if "seconds" in work:
        return float(work["seconds"])
    threads = str(min(work.get("threads", 1), limits["cores"]))
    products = work.get("flops", 0) / limits["flops"][work.get("precision", "fp32")][threads]
    traffic = work.get("bytes", 0) / limits["bytes"][threads]
    return float(max(products, traffic) + work.get("starts", 0) * limits["start"])


def encoder_flops(lengths: Iterable[int]) -> float:
    """Return the operations of the products of the default encoder for windows of these lengths, without padding."""
    config = read_json(find_encoder(DEFAULT_ENCODER).folder / "config.json")
    layers, hidden, inner = (config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    linear = 2 * (4 * hidden * hidden + 2 * hidden * inner)
    return float(sum(layers * int(tokens) * (linear + 4 * int(tokens) * hidden) for tokens in lengths))


def reading_flops(pairs: Sequence[tuple[str, str]]) -> float:
    """Return the operations of the default encoder for questions with their contexts."""
    from lamella.data.windows.features import featurise
    from lamella.encoder.pretrained import load_tokenizer

    examples = [Example(str(number), question, Context(text), ()) for number, (question, text) in enumerate(pairs)]
    tokenizer = load_tokenizer(find_encoder(DEFAULT_ENCODER))
    return encoder_flops(featurise(examples, tokenizer, WindowOptions()).lengths)
