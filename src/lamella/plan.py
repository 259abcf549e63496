"""A plan: the runs that one file describes, and which of them share a pass of the encoder.

A run file describes one run. Several learners, as `[[learner]]` tables, and a grid make it describe several:

    [grid.learner]
    mixer = ["last", "dot", ["scalar_mix", "compress"]]     # every entry is one value of the option
    seed = [0, 1]

    [grid.encoder]
    dropout = [0.1, 0.2]

A grid mirrors the sections of the file, with a list of values in the place of each value; all combinations are run.
Runs that differ in their learner alone, on a frozen encoder, go through one pass together.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.config import RunConfig, check_config, read_table
from lamella.errors import ConfigError
from lamella.runs import FILES, MODEL, MODELS

Pass = dict[str, RunConfig]  # by the name of the run; all but the learner is the same


@dataclass(frozen=True)
class Plan:
    """The runs of a file, pass by pass."""

    passes: tuple[Pass, ...]
    varied: Mapping[str, Mapping[str, Any]]  # by the name of the run: the options in which the runs differ

    @property
    def runs(self) -> dict[str, RunConfig]:
        return {name: config for one in self.passes for name, config in one.items()}


def load_plan(path: Path | None, overrides: Sequence[str] = ()) -> Plan:
    """Read a run file and check every run that it describes."""
    table, problems = read_table(path, overrides)
    return make_plan(table, where=str(path or "configuration"), problems=problems)


def make_plan(table: Mapping[str, Any], *, where: str, problems: Sequence[str] = ()) -> Plan:
    """The runs of a table: its learners times its grid."""
    whole: dict[str, Any] = copy.deepcopy(dict(table))
    grid = whole.pop("grid", {})
    learners = whole.get("learner", {})
    found = list(problems)
    axes = _axes(grid, found)
    sections = [(keys[0], whole.get(keys[0], {})) for keys, _ in axes if keys[0] != "learner"]
    sections += [("learner", one) for one in _listed(learners)] or [("learner", learners)]
    no_tables = [
        f"{section}: expected a table of options. Got {options!r}."
        for section, options in sections
        if not isinstance(options, dict)
    ]
    if no_tables:  # nothing can be made of these, not even a list of what else is wrong
        raise ConfigError(where, [*found, *no_tables])
    tables: list[tuple[str | None, dict[str, Any]]] = []
    for learner in _listed(learners):
        name = learner.pop("name", None)
        if name is not None and not names_a_folder(name):
            found.append(
                f"learner.name: expected letters, digits and . + - _ (none of a run's own files), to name a folder. "
                f"Got {name!r}."
            )
        for values in itertools.product(*(options for _, options in axes)):
            one = copy.deepcopy({**whole, "learner": learner} if "learner" in whole else whole)
            for (keys, _), value in zip(axes, values, strict=True):
                one.setdefault(keys[0], {})[keys[1]] = copy.deepcopy(value)
            tables.append((name, one))
    configs: list[RunConfig] = []
    for _, one in tables:
        try:
            configs.append(check_config(one, where=where))
        except ConfigError as error:
            found += error.problems
    if found:
        raise ConfigError(where, list(dict.fromkeys(found)))
    differences = _varied(configs)
    names = _names([name for name, _ in tables], differences, where)
    return Plan(share_passes(dict(zip(names, configs, strict=True))), dict(zip(names, differences, strict=True)))


def share_passes(configs: Mapping[str, RunConfig]) -> tuple[Pass, ...]:
    """Runs on the same frozen encoder and the same batches share a pass; one that trains its encoder has its own."""
    groups: dict[str, Pass] = {}
    for name, config in configs.items():
        shared = json.dumps(config.model_dump(mode="json", exclude={"learner"}), sort_keys=True)
        alone = config.encoder.tuning["name"] != "frozen"
        groups.setdefault(f"{name}\n{shared}" if alone else shared, {})[name] = config
    return tuple(_with_strata(one) for one in groups.values())


def names_a_folder(name: Any) -> bool:
    """Whether a run within a run may be called so: not as anything that the outer one writes itself."""
    return isinstance(name, str) and bool(re.fullmatch(r"[\w+-][\w.+-]*", name)) and name not in (*FILES, MODEL, MODELS)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _axes(grid: Any, problems: list[str]) -> list[tuple[tuple[str, str], list[Any]]]:
    """The options that vary, with their values, in the order of the file."""
    axes: list[tuple[tuple[str, str], list[Any]]] = []
    if not isinstance(grid, Mapping):
        problems.append(f"grid: expected tables like those of the file, [grid.learner]. Got {grid!r}.")
        return axes
    for section, options in grid.items():
        if section not in RunConfig.model_fields or not isinstance(options, Mapping):
            problems.append(f"grid.{section}: expected a section of the file, [grid.learner], with its options.")
            continue
        for option, values in options.items():
            if not isinstance(values, list) or not values:
                problems.append(f"grid.{section}.{option}: expected a list of values to try. Got {values!r}.")
                continue
            axes.append(((section, option), values))
    return axes


def _varied(configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """For each run its values of the options that are not the same in all."""
    flat = [config.flat() for config in configs]
    differ = [key for key in flat[0] if len({json.dumps(one[key], sort_keys=True) for one in flat}) > 1]
    return [{key: one[key] for key in differ} for one in flat]


def _names(given: Sequence[str | None], varied: Sequence[Mapping[str, Any]], where: str) -> list[str]:
    """A name for every run, fit for a folder: the one given, and what else it differs in from those of that name."""
    names = []
    for name, differences in zip(given, varied, strict=True):
        siblings = [other for other, own in zip(varied, given, strict=True) if own == name]
        telling = {
            key: value
            for key, value in differences.items()
            if name is None or any(other[key] != value for other in siblings)
        }
        words = [_word(key, value) for key, value in telling.items()]
        names.append("-".join([*([name] if name else []), *words]) or "run")
    taken: dict[str, int] = {}
    unique = []
    for name in names:
        taken[name] = taken.get(name, 0) + 1
        unique.append(name if taken[name] == 1 else f"{name}-{taken[name]}")
    if len(set(unique)) < len(unique):
        raise ConfigError(where, [f"learner.name: expected different names. Got {', '.join(unique)}."])
    return unique


def _word(key: str, value: Any) -> str:
    """`learner.mixer = [{name = "dot"}]` becomes `dot`, `learner.seed = 1` becomes `seed1`."""
    option = key.rpartition(".")[2]
    part = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
    return re.sub(r"[^\w.+-]+", "_", _spell(value) if part else f"{option}{_spell(value)}")


def _spell(value: Any) -> str:
    if isinstance(value, dict):
        return "_".join(_spell(one) if key == "name" else f"{key}{_spell(one)}" for key, one in value.items())
    if isinstance(value, list):
        return "+".join(map(_spell, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _with_strata(configs: Pass) -> Pass:
    """Write the fractions of all into each, so that one of them run alone goes through the same batches."""
    fractions = {config.learner.fraction for config in configs.values()}
    strata = sorted({*fractions, *(cut for config in configs.values() for cut in config.training.strata)})
    if strata == [1.0]:
        return configs
    return {
        name: config.model_copy(update={"training": config.training.model_copy(update={"strata": strata})})
        for name, config in configs.items()
    }
