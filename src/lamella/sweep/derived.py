"""Rows of a sweep that are not trained: copies that `training.save_at` kept, and ensembles of runs.

They are made from finished runs, on the dev data of these, into run folders like those of `evaluate` and `ensemble`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamella import runs
from lamella.config import RunConfig
from lamella.errors import RunError, UsageError
from lamella.files import read_json, write_json
from lamella.plan import DerivedOptions
from lamella.progress import Log
from lamella.run_file import load_config

if TYPE_CHECKING:
    from lamella.data.dataset import Dataset
    from lamella.inference.combine import Combination


@dataclass(frozen=True)
class DerivedRow:
    """A copy of a run, or an ensemble."""

    name: str
    models: tuple[str, ...]  # what it is made from: RUN or RUN@EPOCH
    how: Combination | None = None  # how members are combined; None: a copy of the only model
    members: tuple[str, ...] = ()  # of an ensemble, as the run file names them: without the seed
    seed: int | None = None  # of the runs, with --seeds

    @property
    def sources(self) -> frozenset[str]:
        """The runs that it is made from."""
        return frozenset(_run_of(model) for model in self.models)


def derived_rows(options: DerivedOptions, configs: Mapping[str, RunConfig], seeds: Sequence[int]) -> list[DerivedRow]:
    """Return the derived rows of a run file, once per seed if they are made from runs of the sweep, `configs`."""
    given = [DerivedRow(copy, (copy,)) for copy in options.copies]
    given += [DerivedRow(item.name, tuple(item.members), item.how, tuple(item.members)) for item in options.ensembles]
    rows = []
    for row in given:
        if not seeds or not row.sources & set(configs):
            rows.append(row)
            continue
        for seed in seeds:
            models = tuple(with_seed(model, seed) if _run_of(model) in configs else model for model in row.models)
            rows.append(DerivedRow(f"{row.name}-seed{seed}", models, row.how, row.members, seed))
    return rows


def with_seed(model: str, seed: int) -> str:
    """Return the name of a run, or of a copy of it, for one of several seeds: `bert@0.3` becomes `bert-seed1@0.3`."""
    run, at, epoch = model.partition("@")
    return f"{run}-seed{seed}{at}{epoch}"


def source_config(row: DerivedRow, configs: Mapping[str, RunConfig], out: Path, where: Path) -> RunConfig:
    """Return the options of the first run that a row is made from; check that all were scored on the same questions."""
    found = []
    for model in row.models:
        run, at, epoch = model.partition("@")
        if run not in configs and not (out / run / runs.CONFIG).is_file():
            raise UsageError(
                f"{where}: derived row {row.name}: expected the run {run!r}, but it is neither in this sweep nor in "
                f"{out}; add its run file."
            )
        config = configs.get(run) or load_config(out / run / runs.CONFIG, check_parts=False)
        epochs = [f"{value:g}" for value in config.training.save_at]
        if at and epoch not in epochs:
            raise UsageError(
                f"{where}: derived row {row.name}: expected an epoch of training.save_at of {run} "
                f"({', '.join(epochs) or 'which is empty'}), got {epoch!r}."
            )
        if not config.data.dev:
            raise UsageError(f"{where}: derived row {row.name}: expected {run} to have data.dev to score on, got none.")
        found.append(config)
    first = found[0]
    for model, config in zip(row.models, found, strict=True):
        if (config.data.dev, config.data.max_eval_samples) != (first.data.dev, first.data.max_eval_samples):
            raise UsageError(
                f"{where}: derived row {row.name}: expected members with the same dev data, but {model} and "
                f"{row.models[0]} differ in data.dev or data.max_eval_samples."
            )
    return first


def is_current(row: DerivedRow, out: Path) -> bool:
    """Whether a row is done: finished, and not before the runs that it is made from were trained again."""
    if runs.run_state(out / row.name) != "finished":
        return False
    started = str(read_json(out / row.name / runs.RUN).get("started"))
    return all(
        runs.run_state(out / run) == "finished" and str(read_json(out / run / runs.RUN).get("ended")) <= started
        for run in row.sources
    )


def check_same_row(row: DerivedRow, out: Path, *, advice: str) -> None:
    """Check that an ensemble in the folder of the sweep is the one that is asked for now."""
    path = out / row.name / runs.CONFIG
    if row.how is None or not path.is_file():
        return
    recorded = read_json(path).get("ensemble", {})
    for key, value in (("members", list(row.members)), ("how", row.how)):
        if recorded.get(key) != value:
            raise RunError(f"{path}: this ensemble has {key} = {recorded.get(key)!r}, got {value!r}. {advice}")


def make_row(row: DerivedRow, config: RunConfig, out: Path, log: Log) -> None:
    """Answer and score the dev questions of a run, and write the run folder of the row."""
    from lamella.training.splits import read_split

    dev = read_split("dev", config, config.data.max_eval_samples, log)
    if row.how is None:
        _evaluate_copy(row, config, dev, out)
    else:
        _combine_members(row, config, dev, out)


def _evaluate_copy(row: DerivedRow, config: RunConfig, dev: Dataset, out: Path) -> None:
    from lamella.inference.model_record import model_record
    from lamella.models.loading import load_model
    from lamella.scoring.answer_metrics import build_metrics
    from lamella.scoring.evaluate import evaluate_model
    from lamella.sweep.derived_cost import add_training

    path = str(_model_path(row.models[0], out))
    # On torch, as in training: the copy at the end of a run answers as the run does, and times can be compared.
    model = load_model(path, precision=config.training.precision, backend="torch")
    run, _, epoch = row.models[0].partition("@")
    options = {**read_json(out / run / runs.CONFIG), "copy": {"epoch": float(epoch)}}
    with runs.new_run(
        out / row.name,
        "evaluate",
        overwrite=True,
        needs=model.folders,
        data=_data_record(config, dev),
        model=model_record(path, model),
    ) as folder:
        write_json(folder / runs.CONFIG, options)
        evaluate_model(
            model,
            dev.examples,
            folder,
            batch_size=config.training.eval_batch_size,
            metrics=build_metrics(config.training.metrics),
        )
        add_training(folder, out / run, float(epoch))


def _combine_members(row: DerivedRow, config: RunConfig, dev: Dataset, out: Path) -> None:
    from lamella.inference.ensemble import Ensemble
    from lamella.inference.members import open_members
    from lamella.scoring.ensemble_gain import write_ensemble
    from lamella.sweep.derived_cost import add_members

    assert row.how is not None
    paths = [str(_model_path(model, out)) for model in row.models]
    members = open_members(paths, run=True, precision=config.training.precision)
    combined = Ensemble(members, dev.examples, how=row.how)
    needs = [folder for member in members for folder in member.folders]
    with runs.new_run(
        out / row.name, "ensemble", overwrite=True, needs=needs, data=_data_record(config, dev)
    ) as folder:
        write_ensemble(folder, combined.answer(batch_size=config.training.eval_batch_size), dev.examples)
        recorded = read_json(folder / runs.CONFIG)
        options: dict[str, Any] = {"ensemble": {**recorded["ensemble"], "members": list(row.members)}}
        if row.seed is not None:
            options["learner"] = {"seed": row.seed}  # ensembles that differ in nothing else are one reader
        write_json(folder / runs.CONFIG, options)
        parts = [model.partition("@") for model in row.models]
        add_members(folder, [(out / run, float(epoch) if at else None) for run, at, epoch in parts])


def _data_record(config: RunConfig, dev: Dataset) -> dict[str, Any]:
    return runs.data_record(config.data.files("dev"), (example.id for example in dev.examples))


def _model_path(model: str, out: Path) -> Path:
    run, at, epoch = model.partition("@")
    return out / run / runs.MODELS / epoch if at else out / run


def _run_of(model: str) -> str:
    return model.partition("@")[0]
