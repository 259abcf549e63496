"""A plan: the runs that one run file describes, and which of them share a pass of the encoder.

A run file describes one run. Several learners, as `[[learner]]` tables, and a grid make it describe several:

    [grid.learner]
    mixer = ["last", "dot", ["scalar_mix", "compress"]]     # every entry is one value of the option
    seed = [0, 1]

    [grid.encoder]
    dropout = [0.1, 0.2]

A grid mirrors the sections of the file, with a list of values instead of each value; all combinations are run. Runs
that differ in more than this are `[[run]]` tables: each has a name, and its options go on top of the file's:

    [[run]]
    name = "top3"
    encoder.tuning = { name = "top_k", k = 3 }

Runs on the same frozen encoder that differ only in their learner share a pass.

Rows of a table that are not trained, but made from runs, are listed in `[derived]`; `sweep` makes them:

    [derived]
    copies = ["bert@0.3", "bert@1"]                         # of `training.save_at`

    [[derived.ensembles]]
    name = "both"
    members = ["head", "bert@0.3"]
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from lamella.config import RunConfig
from lamella.errors import ConfigError, UnknownNameError, UsageError, printable, shorten
from lamella.option_errors import explain
from lamella.registry import trait
from lamella.run_file import apply_overrides, merge_tables, read_table
from lamella.runs import DATA, FILES, MODEL, MODELS
from lamella.section import Section
from lamella.validation import check_config

DERIVED = "derived"  # the key of the rows that are not trained
RUN = "run"  # the key of the `[[run]]` tables
FOLDER_NAME = "a folder name of letters, digits and . + - _ that is not one of a run's own files"

Pass = dict[str, RunConfig]  # by run name; all options but the learner's are the same
Axis = tuple[tuple[str, str], list[Any]]  # section and option, and its values


class EnsembleOptions(Section):
    """An ensemble of runs."""

    name: str
    members: list[str] = Field(min_length=2)
    how: Literal["max", "mean", "product", "vote"] = "mean"


class DerivedOptions(Section):
    """Rows that are made from runs; a run, or RUN@EPOCH for a copy of `training.save_at`, is a member."""

    copies: list[str] = Field(default=[])
    ensembles: list[EnsembleOptions] = Field(default=[])


@dataclass(frozen=True)
class Plan:
    """The runs of a file, pass by pass."""

    passes: tuple[Pass, ...]
    varied: Mapping[str, Mapping[str, Any]]  # by run name: the options in which the runs differ
    named: bool = False  # whether the file names its runs, in `[[run]]` tables
    derived: DerivedOptions = field(default_factory=DerivedOptions)
    where: str = "run file"  # in errors: its path

    @property
    def runs(self) -> dict[str, RunConfig]:
        return {name: config for configs in self.passes for name, config in configs.items()}


def load_plan(path: Path | None, overrides: Sequence[str] = (), *, only: Sequence[str] = ()) -> Plan:
    """Read a run file and check every run that it describes; `only` selects `[[run]]` tables by name."""
    table = {} if path is None else read_table(path)
    return make_plan(table, where=str(path or "configuration"), overrides=overrides, only=only)


def make_plan(table: Mapping[str, Any], *, where: str, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Plan:
    """Return the runs of a table: its `[[run]]` tables, each times its learners and its grid."""
    problems: list[str] = []
    configs: Pass = {}
    derived = DerivedOptions() if only else _derived(table.get(DERIVED, {}), problems)
    run_tables = _run_tables(table, problems)
    for name in only:
        if name not in run_tables:
            known = [known for known in run_tables if known]
            if not known:
                raise UsageError(
                    f"{where}: expected [[run]] tables to choose {shorten(name)} from, found none; the runs of a grid "
                    "are trained together."
                )
            raise UnknownNameError(f"{where}: run", name, known)
    for run_name, options in run_tables.items():
        if only and run_name not in only:
            continue
        run_problems = apply_overrides(options, overrides)
        group = _expand(options, where, run_problems)
        problems += [f"run {run_name}: {problem}" if run_name else problem for problem in run_problems]
        if run_name and len(group) == 1:
            group = {run_name: next(iter(group.values()))}
        elif run_name:
            group = {f"{run_name}-{name}": config for name, config in group.items()}
        problems += [f"run {run_name}: another run has the name {name} too." for name in group if name in configs]
        # Fractions are written only into the runs of this table: they do not change the batches of the others.
        for pass_configs in share_passes(group):
            configs |= pass_configs
    if problems:
        raise ConfigError(where, list(dict.fromkeys(problems)))
    varied = dict(zip(configs, _varied(list(configs.values())), strict=True))
    return Plan(share_passes(configs), varied, named=RUN in table, derived=derived, where=where)


def share_passes(configs: Mapping[str, RunConfig]) -> tuple[Pass, ...]:
    """Group runs on the same frozen encoder and the same batches; a run that trains its encoder has its own pass."""
    groups: dict[str, Pass] = {}
    for name, config in configs.items():
        shared = json.dumps(config.model_dump(mode="json", exclude={"learner"}), sort_keys=True)
        alone = trait("tuning", config.encoder.tuning, "trains_encoder")
        groups.setdefault(f"{name}\n{shared}" if alone else shared, {})[name] = config
    return tuple(_with_strata(group) for group in groups.values())


def is_folder_name(name: Any) -> bool:
    """Whether a run inside another run's folder may have this name: it must differ from the files of a run."""
    return (
        isinstance(name, str)
        and bool(re.fullmatch(r"[\w+-][\w.+-]*", name))
        and name not in (*FILES, MODEL, MODELS, DATA)
    )


def _run_tables(table: Mapping[str, Any], problems: list[str]) -> dict[str | None, dict[str, Any]]:
    """Return the table of every `[[run]]` by its name, or the whole table under None if there are no runs."""
    shared = {key: value for key, value in table.items() if key not in (RUN, DERIVED)}
    if RUN not in table:
        return {None: copy.deepcopy(shared)}
    entries = table[RUN]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        problems.append(f"{RUN}: expected [[{RUN}]] tables, each with a name and its options, got {shorten(entries)}.")
        return {}
    names = [entry.get("name") for entry in entries]
    problems += [
        f"{RUN}.name: expected {FOLDER_NAME}, got {shorten(name)}." for name in names if not is_folder_name(name)
    ]
    problems += [
        f"{RUN}.name: expected different names, got {name!r} {count} times."
        for name, count in Counter(name for name in names if is_folder_name(name)).items()
        if count > 1
    ]
    return {
        name: merge_tables(shared, {key: value for key, value in entry.items() if key != "name"})
        for name, entry in zip(names, entries, strict=True)
        if is_folder_name(name)
    }


def _derived(given: Any, problems: list[str]) -> DerivedOptions:
    """Return the rows that are made from runs."""
    if not isinstance(given, dict):
        problems.append(f"{DERIVED}: expected a table with copies and ensembles, got {shorten(given)}.")
        return DerivedOptions()
    try:
        options = DerivedOptions.model_validate(given)
    except ValidationError as error:
        problems += explain(error, given, DerivedOptions, DERIVED)
        return DerivedOptions()
    for saved in options.copies:
        run, _, epoch = saved.partition("@")
        if not is_folder_name(run) or not re.fullmatch(r"[\d.]+", epoch):
            problems.append(f'{DERIVED}.copies: expected a run and an epoch, as in "bert@0.3", got {shorten(saved)}.')
    for ensemble in options.ensembles:
        if not is_folder_name(ensemble.name):
            problems.append(f"{DERIVED}.ensembles.name: expected {FOLDER_NAME}, got {shorten(ensemble.name)}.")
    return options


def _expand(table: dict[str, Any], where: str, problems: list[str]) -> Pass:
    """Return the runs of a table, its learners times its grid, and add what is wrong with it to `problems`."""
    axes = _axes(table.pop("grid", {}), problems)
    learners = table.get("learner", {})
    sections = [(keys[0], table.get(keys[0], {})) for keys, _ in axes if keys[0] != "learner"]
    sections += [("learner", learner) for learner in _as_list(learners)] or [("learner", learners)]
    not_tables = [
        f"{section}: expected a table of options, got {shorten(options)}."
        for section, options in sections
        if not isinstance(options, dict)
    ]
    if not_tables:  # the combinations cannot be made, so nothing else can be checked
        problems += not_tables
        return {}
    names, configs = [], []
    for learner in _as_list(learners):
        name = learner.pop("name", None)
        if name is not None and not is_folder_name(name):
            problems.append(f"learner.name: expected {FOLDER_NAME}, got {shorten(name)}.")
        for values in itertools.product(*(values for _, values in axes)):
            combination = copy.deepcopy({**table, "learner": learner} if "learner" in table else table)
            for (keys, _), value in zip(axes, values, strict=True):
                combination.setdefault(keys[0], {})[keys[1]] = copy.deepcopy(value)
            try:
                configs.append(check_config(combination, where=where))
                names.append(name)
            except ConfigError as error:
                problems += error.problems
    if problems:
        return {}
    run_names = _names(names, _varied(configs))
    if len(set(run_names)) < len(run_names):
        problems.append(f"learner.name: expected different names, got {', '.join(run_names)}.")
        return {}
    return dict(zip(run_names, configs, strict=True))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _axes(grid: Any, problems: list[str]) -> list[Axis]:
    """Return the options that vary, with their values, in the order of the file."""
    axes: list[Axis] = []
    if not isinstance(grid, Mapping):
        problems.append(f"grid: expected tables named like the file's sections, [grid.learner], got {shorten(grid)}.")
        return axes
    for section, options in grid.items():
        path = f"grid.{printable(section)}"
        if section not in RunConfig.model_fields or not isinstance(options, Mapping):
            problems.append(f"{path}: expected a section of the file with its options, as in [grid.learner].")
            continue
        for option, values in options.items():
            if not isinstance(values, list) or not values:
                expected = "expected a list of values to try"
                problems.append(f"{path}.{printable(option)}: {expected}, got {shorten(values)}.")
                continue
            axes.append(((section, option), values))
    return axes


def _varied(configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """Return for each run its values of the options in which the runs differ."""
    flat = [config.flat() for config in configs]
    differing = [
        key for key in (flat[0] if flat else {}) if len({json.dumps(run[key], sort_keys=True) for run in flat}) > 1
    ]
    return [{key: run[key] for key in differing} for run in flat]


def _names(given: Sequence[str | None], varied: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a folder name for every run: the given name, and the options in which runs of this name differ."""
    names = []
    for name, options in zip(given, varied, strict=True):
        siblings = [sibling for sibling, sibling_name in zip(varied, given, strict=True) if sibling_name == name]
        distinctive = {
            key: value
            for key, value in options.items()
            if name is None or any(sibling[key] != value for sibling in siblings)
        }
        words = [_word(key, value) for key, value in distinctive.items()]
        names.append("-".join([*([name] if name else []), *words]) or "run")
    counts: Counter[str] = Counter()
    unique = []
    for name in names:
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return unique


def _word(key: str, value: Any) -> str:
    """`learner.mixer = [{name = "dot"}]` becomes `dot`, `learner.seed = 1` becomes `seed1`."""
    option = key.rpartition(".")[2]
    is_part = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
    return re.sub(r"[^\w.+-]+", "_", _spell(value) if is_part else f"{option}{_spell(value)}")


def _spell(value: Any) -> str:
    if isinstance(value, dict):
        return "_".join(_spell(item) if key == "name" else f"{key}{_spell(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "+".join(map(_spell, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _with_strata(configs: Pass) -> Pass:
    """Write the fractions of all runs into each, so that a run trained alone goes through the same batches."""
    fractions = {config.learner.fraction for config in configs.values()}
    strata = sorted({*fractions, *(cut for config in configs.values() for cut in config.training.strata)})
    if strata == [1.0]:
        return configs
    return {
        name: config.model_copy(update={"training": config.training.model_copy(update={"strata": strata})})
        for name, config in configs.items()
    }
