"""The columns of a page of results: what of a reader each shows, and in which form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamella.scoring.significance import bootstrap_differences
from lamella.study.compare import Contender
from lamella.study.report.option_names import told_option

NOTHING = "–"

# What a column is called, and how its number is told; those without a form are made of words.
COLUMNS: dict[str, tuple[str, str]] = {
    "encoder": ("encoder", ""),
    "train": ("train data", ""),
    "seeds": ("seeds", ""),
    "tuning": ("tuning", ""),
    "delta": ("delta parameters (% of the encoder)", ""),
    "exact_at_0": ("EM at 0", "{:.2f}"),
    "f1_at_0": ("F1 at 0", "{:.2f}"),
    "exact": ("EM", ""),
    "f1": ("F1", ""),
    "HasAns_f1": ("F1, with answer", ""),
    "NoAns_f1": ("F1, without", ""),
    "best_f1": ("F1, best", "{:.2f}"),
    "threshold": ("own threshold", "{:.2f}"),
    "epoch": ("epoch", "{:g}"),
    "inference_flops_per_window": ("inference FLOPs a window", ""),
    "training_flops_per_window": ("training FLOPs a window", ""),
    "training_flops": ("training FLOPs", ""),
    "train_seconds": ("train s", "{:,.0f}"),
    "windows_per_second": ("windows/s", "{:,.0f}"),
    "inference_seconds_per_1000": ("ms/question", "{:.2f}"),
    "model_bytes": ("file", ""),
    "peak_memory_bytes": ("peak memory", ""),
    "device": ("device", ""),
}
DEFAULT_COLUMNS = (
    "tuning", "delta", "exact_at_0", "f1_at_0", "exact", "f1", "best_f1", "train_seconds", "windows_per_second",
    "inference_seconds_per_1000", "model_bytes",
)  # fmt: skip
MEASURED = {"train_seconds", "windows_per_second", "inference_seconds_per_1000", "peak_memory_bytes"}  # on a device
_SUFFIXES = re.compile(r"(\.jsonl?|\.csv)?(\.gz)?$")


@dataclass(frozen=True)
class Labels:
    """What things are called on a page: `names` gives words for encoders, files, columns and values."""

    names: Mapping[str, str]

    def title(self, key: str) -> str:
        own = COLUMNS[key][0] if key in COLUMNS else key.rpartition(".")[2].replace("_", " ")
        return self.names.get(key, own)

    def files(self, files: Sequence[Mapping[str, Any]]) -> str:
        """`squad2-train.json.gz` is `squad2-train`, unless it was given other words."""
        told = [str(one["name"]) for one in files]
        return " + ".join(self.names.get(name, _SUFFIXES.sub("", name)) for name in told) or NOTHING

    def cell(self, key: str, one: Contender) -> str:
        if key in _WORDS:
            return _WORDS[key](self, one)
        if key not in COLUMNS:
            return told_value(_option(one, key))
        value = one.mean_result(key) if one.mean_result(key) is not None else one.mean_cost(key)
        return NOTHING if value is None else COLUMNS[key][1].format(value)


def told_value(value: Any) -> str:
    """A value of a file or an option: 6,078, 0.0001, adapter(size=64)."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list) and value and all(isinstance(one, float) for one in value):
        return ", ".join(map(told_value, value))  # as the two ends of a spread
    return " ".join(str(told_option(value)).split())


def percent(value: float) -> str:
    return f"{value:.2f} %" if value >= 0.1 else f"{value:.2g} %"


def _content(one: Contender) -> Mapping[str, Any]:
    kept = one.runs[0].kept
    assert kept is not None
    return kept.content


def _encoder(labels: Labels, one: Contender) -> str:
    encoder = _content(one)["encoder"]
    name = encoder.get("name")
    told = NOTHING if name is None else labels.names.get(name, name)
    return told + "".join(f", by way of {labels.names.get(way, way)}" for way in encoder.get("by_way_of", [])[:1])


def _train(labels: Labels, one: Contender) -> str:
    train, options = _content(one)["train"], _content(one)["options"]
    told = labels.files(train["files"])
    if first := options.get("data.max_train_samples"):
        told += f", the first {first:,}"
    fraction = train.get("fraction", 1.0)
    return told if fraction == 1 else f"{told}, {percent(100 * fraction)} of it"


def _tuning(labels: Labels, one: Contender) -> str:
    tuning = _content(one)["tuning"]
    chosen = {key: value for key, value in tuning.items() if value}  # what is off or empty says nothing
    told = told_value(chosen) if chosen else NOTHING
    return labels.names.get(told, told)


def _delta(labels: Labels, one: Contender) -> str:
    count, share = one.mean_cost("trainable_parameters"), one.mean_cost("trainable_percent_of_encoder")
    if count is None:
        return NOTHING
    return f"{count:,.0f}" + ("" if share is None else f" ({percent(share)})")


def _f1(labels: Labels, one: Contender) -> str:
    """With its deviation between seeds, and its interval: `80.50 ±0.18 [79.2, 81.8]`."""
    kept = one.runs[0].kept
    assert kept is not None
    (drawn,) = bootstrap_differences(one.f1[:, None], kept.paragraphs)
    seeds = "" if one.deviation is None else f" ±{one.deviation:.2f}"
    return f"{one.mean_f1:.2f}{seeds} [{100 * drawn.low:.1f}, {100 * drawn.high:.1f}]"


def _group(key: str) -> Callable[[Labels, Contender], str]:
    """A score that only some of the questions have, at the thresholds of the page."""

    def told(labels: Labels, one: Contender) -> str:
        kept = [run.kept for run in one.runs if run.kept is not None]
        values = [each.content["scores"][each.scored_at].get(key) for each in kept]
        return NOTHING if None in values else f"{sum(values) / len(values):.2f}"

    return told


def _bytes(key: str) -> Callable[[Labels, Contender], str]:
    """`3.3 kB`, `4.84 MB`, `1.11 GB`."""

    def told(labels: Labels, one: Contender) -> str:
        value = one.mean_cost(key)
        if value is None:
            return NOTHING
        if value < 1e6:
            return f"{value / 1e3:.1f} kB"
        return f"{value / 1e6:.2f} MB" if value < 1e9 else f"{value / 1e9:.2f} GB"

    return told


def _flops(key: str) -> Callable[[Labels, Contender], str]:
    """`9.14 GFLOP`, `28.32 PFLOP`."""

    def told(labels: Labels, one: Contender) -> str:
        value = one.mean_cost(key)
        if value is None:
            return NOTHING
        size, prefix = next((each for each in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if value >= each[0]), (1e6, "M"))
        return f"{value / size:.2f} {prefix}FLOP"

    return told


def _option(one: Contender, key: str) -> Any:
    """Of runs that differ in seeds, the option that they share."""
    values = [run.kept.content["options"].get(key) for run in one.runs if run.kept is not None]
    return values[0] if all(value == values[0] for value in values) else ", ".join(map(told_value, values))


_WORDS: dict[str, Callable[[Labels, Contender], str]] = {
    "encoder": _encoder,
    "train": _train,
    "tuning": _tuning,
    "delta": _delta,
    "seeds": lambda labels, one: str(len(one.runs)),
    "exact": lambda labels, one: f"{100 * float(one.exact.mean()):.2f}",
    "f1": _f1,
    "HasAns_f1": _group("HasAns_f1"),
    "NoAns_f1": _group("NoAns_f1"),
    **{key: _flops(key) for key in ("inference_flops_per_window", "training_flops_per_window", "training_flops")},
    "model_bytes": _bytes("model_bytes"),
    "peak_memory_bytes": _bytes("peak_memory_bytes"),
    "device": lambda labels, one: str(one.runs[0].cost.get("device", NOTHING)),
}
