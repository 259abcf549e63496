"""The options in which the runs of a report differ, in readable form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from lamella import runs
from lamella.models.names import short_model_name
from lamella.study.report.values import ReportValues, without_folders

# Runs that differ only in these form one line of the plot of training set sizes.
NOT_A_KIND = ("learner.fraction", "learner.seed", "training.order_seed")


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
        run["fraction"] = options.get("learner.fraction")
        kind = {key: options.get(key) for key in varied if key not in NOT_A_KIND}
        run["alike"] = (
            ", ".join(_describe(key, value) for key, value in kind.items() if value is not None) or "all runs"
        )
    return varied


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
