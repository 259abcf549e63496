"""What the runs of a report differ in, as a person would write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from lamella.study.report.values import Record, without_folders

# Runs that differ in these alone are the same kind of run.
NOT_A_KIND = ("learner.fraction", "learner.seed", "training.order_seed")


def name_what_differs(records: Sequence[Record], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Give every record the options that are not the same in all; gives their names."""
    flat = [_flat(config) for config in configs]
    keys = list(dict.fromkeys(key for options in flat for key in options))
    told = [options for options in flat if options]  # a run of `evaluate` has none, which is no difference
    varied = [
        key for key in keys if key != "training.strata" and len({json.dumps(options.get(key)) for options in told}) > 1
    ]
    for record, options in zip(records, flat, strict=True):
        record["options"] = {key: told_option(options[key]) for key in varied if key in options}
        record["fraction"] = options.get("learner.fraction")
        others = {key: options.get(key) for key in varied if key not in NOT_A_KIND}
        record["alike"] = (
            ", ".join(_kind(key, value) for key, value in others.items() if value is not None) or "all runs"
        )
    return varied


def _flat(config: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """`{"learner": {"seed": 0}}` is `{"learner.seed": 0}`; a named choice, as of a mixer, stays whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and ("name" not in value or not front):
            flat |= _flat(value, f"{front}{key}.")
        else:
            flat[f"{front}{key}"] = value
    return flat


def _kind(key: str, value: Any) -> str:
    """`last` speaks for itself, `60` needs its name: `max train samples 60`."""
    told = told_option(value)
    return told if isinstance(told, str) else f"{key.rpartition('.')[2].replace('_', ' ')} {told}"


def told_option(value: Any) -> str | float | int | None:
    """An option as a person would write it: `[{"name": "scalar_mix"}]` is `scalar_mix`."""
    if isinstance(value, list):
        return " + ".join(str(told_option(one)) for one in value) or "none"
    if isinstance(value, dict):
        rest = ", ".join(f"{key}={told_option(one)}" for key, one in value.items() if key != "name")
        name = str(value.get("name", ""))
        return f"{name}({rest})" if rest else name
    if isinstance(value, str) and PurePath(value).is_absolute():
        return without_folders(value)
    return value if isinstance(value, int | float | str) or value is None else str(value)
