"""Notes about overrides that make the runs of a file more alike than the file has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella.errors import shorten
from lamella.plan import RUN, Plan
from lamella.run_file import read_table


def override_notes(file: Path, plan: Plan, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a line for each override that replaces different values, and for runs that have the same options now.

    A table may compare encoders or batch sizes: with the same one for all rows, names such as `bert` say nothing.
    """
    table = read_table(file) if overrides else {}
    for override in overrides:
        option = override.partition("=")[0].strip()
        own: dict[str, list[str]] = {}  # the runs by the value that their own table has
        values = set()
        for run in table.get(RUN, []):
            found = _lookup(run, option)
            if found is not None:
                own.setdefault(shorten(found), []).append(run["name"])
            if option != "encoder.name" or _lookup(run, "encoder.from") is None:  # else the run it starts from decides
                values.add(json.dumps(_lookup(table, option) if found is None else found, sort_keys=True))
        if own and len(values) > 1:
            replaced = ", ".join(f"{value} of {' and '.join(names)}" for value, names in own.items())
            yield f"{file}: --set {option} replaces {replaced}: the runs no longer differ in it"
    alike: dict[str, list[str]] = {}
    for name, config in plan.runs.items() if overrides else ():
        alike.setdefault(json.dumps(config.model_dump(mode="json"), sort_keys=True), []).append(name)
    for names in alike.values():
        if len(names) > 1:
            yield f"{file}: {' and '.join(names)} have the same options now, and give the same reader"


def _lookup(table: Mapping[str, Any], option: str) -> Any:
    """Return an option of a table by its full name; None if the table does not set it."""
    value: Any = table
    for key in option.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
