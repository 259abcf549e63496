"""The options in which the runs of a report differ, in readable form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from lamella import runs
from lamella.models.names import short_model_name
from lamella.study.reader_options import reader_options
from lamella.study.report.values import ReportValues, without_folders

FRACTION = "learner.fraction"


def add_varied_options(shown: Sequence[ReportValues], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add to every run the options that differ between the runs; return the names of these options."""
    flat = [_flatten(config) for config in configs]
    keys = list(dict.fromkeys(key for options in flat for key in options))
    recorded = [options for options in flat if options]  # a run of `evaluate` has none, which is no difference
    varied = [
        key
        for key in keys
        if key != "training.strata" and len({json.dumps(options.get(key)) for options in recorded}) > 1
    ]
    for run, options in zip(shown, flat, strict=True):
        run["options"] = {key: readable_option(options[key]) for key in varied if key in options}
        run["fraction"] = options.get(FRACTION)
    _add_lines_of_fractions(shown, flat)
    return varied


def _add_lines_of_fractions(shown: Sequence[ReportValues], flat: Sequence[Mapping[str, Any]]) -> None:
    """Add to every run the name of its line in the plot of training set sizes; None if its learner has only one size.

    A line is a learner: seeds, and options that change nothing, do not tell runs apart. It is named after the options
    in which the lines differ.
    """
    kinds = [{key: value for key, value in reader_options(of_run).items() if key != FRACTION} for of_run in flat]
    keys = [json.dumps(kind, sort_keys=True) for kind in kinds]
    sizes: dict[str, set[Any]] = {}
    for key, run in zip(keys, shown, strict=True):
        sizes.setdefault(key, set()).add(run["fraction"])
    lines = {key: kind for key, kind in zip(keys, kinds, strict=True) if len(sizes[key] - {None}) > 1}
    names = dict.fromkeys(name for kind in lines.values() for name in kind)
    varied = [name for name in names if len({json.dumps(kind.get(name)) for kind in lines.values()}) > 1]
    for key, kind, run in zip(keys, kinds, shown, strict=True):
        known = {name: kind[name] for name in varied or ["learner.mixer"] if kind.get(name) is not None}
        described = ", ".join(_describe(name, value) for name, value in known.items())
        run["alike"] = (described or "all runs") if key in lines else None


def readable_option(value: Any) -> str | float | int | None:
    """Return an option in short form: `[{"name": "scalar_mix"}]` becomes `scalar_mix`."""
    if isinstance(value, list):
        return " + ".join(str(readable_option(item)) for item in value) or "none"
    if isinstance(value, dict):
        rest = ", ".join(f"{key}={readable_option(item)}" for key, item in value.items() if key != "name")
        name = str(value.get("name", ""))
        return f"{name}({rest})" if rest else name
    if isinstance(value, str) and PurePath(value).is_absolute():
        path = PurePath(value)
        of_run = path.name == runs.MODEL or path.parent.name == runs.MODELS  # named after its run
        return short_model_name(value) if of_run else without_folders(value)
    return value if isinstance(value, int | float | str) or value is None else str(value)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn `{"learner": {"seed": 0}}` into `{"learner.seed": 0}`; a part with its options, as a mixer, stays whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and ("name" not in value or not prefix):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _describe(key: str, value: Any) -> str:
    """Return a text as it is, and a number with its name: `last`, `max train samples 60`."""
    text = readable_option(value)
    return text if isinstance(text, str) else f"{key.rpartition('.')[2].replace('_', ' ')} {text}"
