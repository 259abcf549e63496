"""The public Python functions: train, evaluate, compare and report, and the run folder as an object."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamella import runs
from lamella.config import RunConfig
from lamella.data.dataset import OnBadAnswer, load_examples
from lamella.data.file_formats.in_memory import split_paths
from lamella.data.file_formats.writers import write_flat
from lamella.errors import RunError, UsageError, explain_missing, shorten
from lamella.files import flatten_paths, read_json, read_text
from lamella.plan import make_plan
from lamella.progress import Log
from lamella.run_file import merge_tables, read_table
from lamella.validation import check_config

if TYPE_CHECKING:
    from lamella.inference.reader import Reader
    from lamella.models.loading import Precision
    from lamella.study.compare import Comparison

PathLike = str | os.PathLike[str]

logger = logging.getLogger("lamella")


class Run:
    """A run folder: the trained reader with its scores, its history and its options.

    `lamella.train` returns one; `Run.load` opens the folder of an earlier run, also one from the command line. A run
    file with several learners or a grid produces several runs in one folder: they are in `runs`, by name.

    >>> run = Run.load("runs/demo")
    >>> run.metrics["f1"]
    >>> run.reader().ask("Who discovered Titan?", text)
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)

    @classmethod
    def load(cls, path: PathLike) -> Run:
        """Open a run folder, which may be unfinished; see `state`."""
        folder = Path(os.path.expanduser(path))
        if runs.run_state(folder) is None:
            raise RunError(f"{folder}: expected a run folder, with {runs.RUN}, and found none; check the path.")
        return cls(folder)

    @property
    def state(self) -> str:
        """`finished`, `unfinished`, `failed` or `interrupted`, as recorded on disk now."""
        return str(runs.run_state(self.path))

    @cached_property
    def runs(self) -> dict[str, Run]:
        """The runs inside this one, by name; empty if it is a single run."""
        _, names = runs.kind_of_run(self.path) or ("", [])
        return {name: Run(self.path / name) for name in names}

    @cached_property
    def config(self) -> RunConfig:
        """All options of the run, defaults included."""
        path = self._single() / runs.CONFIG
        return check_config(read_json(path), where=str(path))

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The scores of the best checkpoint on the dev data, by the names of the SQuAD 2.0 script.

        Empty if there was no dev data.
        """
        path = self._single() / runs.RESULTS
        return dict(read_json(path)) if path.is_file() else {}

    @cached_property
    def cost(self) -> dict[str, Any]:
        """Trainable parameters, seconds, memory and file size."""
        path = self._single() / runs.COST
        return dict(read_json(path)) if path.is_file() else {}

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """One flat record per logged step and per evaluation; `pandas.DataFrame(run.history)` is a table of them.

        `event` is the kind of a record: "step" has the loss, "evaluation" has the scores.
        """
        path = self._single() / runs.HISTORY
        return [json.loads(line) for line in read_text(path).splitlines()] if path.is_file() else []

    def reader(self, **options: Any) -> Reader:
        """Load the trained reader, with the options of `Reader.load`: `device`, `precision`, …"""
        from lamella.inference.reader import Reader

        return Reader.load(self._single(), **options)

    def _single(self) -> Path:
        if self.runs:
            names = list(self.runs)
            raise UsageError(
                f"{self.path}: expected a single run, found {len(names)}; choose one: run.runs[{names[0]!r}]."
            )
        return self.path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


def train(
    config: RunConfig | Mapping[str, Any] | PathLike | None = None,
    *,
    train: Any = None,
    dev: Any = None,
    out: PathLike,
    overwrite: bool = False,
    resume: bool = False,
    auto_batch: bool = False,
    cache: PathLike | None = None,
    log: Log | None = None,
    **overrides: Any,
) -> Run:
    """Train a reader, or several in one pass of the encoder, and return the run.

    >>> run = train("run.toml", out="runs/first", training={"epochs": 3})
    >>> run = train(train=rows, dev="dev.json", out="runs/second", encoder={"tuning": "adapter"})

    Args:
        config: A run file, a `RunConfig`, or a dictionary with the sections of a run file. By default, all options have
            their defaults.
        train: Data to train on, instead of `data.train`: a path or a list of paths, or data in memory (a list of
            dictionaries, a pandas DataFrame, a `datasets.Dataset`). Data in memory is stored in the run folder, under
            `data/`, so that the run can be repeated and compared.
        dev: Data to score on, instead of `data.dev`, in the same forms.
        out: The run folder to write. It must be new or empty, unless you overwrite or resume.
        overwrite: Replace the run in `out`.
        resume: Continue the run in `out` from its last checkpoint.
        auto_batch: On out-of-memory, split the batch and retry.
        cache: A folder of hidden states that `lamella extract` wrote.
        log: Receives each progress line, for example `print`. By default they go to the logger `lamella`, level INFO.
        **overrides: Options by section, on top of `config`: `training={"epochs": 3}, learner={"mixer": "dot"}`.
    """
    with explain_missing("lamella.train"):
        from lamella.training.run import train_plan

    if resume and overwrite:
        raise UsageError("train: expected at most one of resume and overwrite, got both.")
    if not isinstance(out, str | os.PathLike):
        raise UsageError(f"train: out: expected the run folder to write, got {shorten(out)}.")
    table, where = _read_config(config)
    table = _override(table, overrides)
    folder = Path(os.path.expanduser(out))
    splits = {split: _Data(data, folder, split) for split, data in (("train", train), ("dev", dev)) if data is not None}
    if splits:
        table = _override(table, {"data": {split: data.files for split, data in splits.items()}})
    plan = make_plan(table, where=where)
    if resume:
        runs.check_resumable(folder)
    runs.check_run_folder(folder, overwrite=overwrite or resume)
    on_bad_answer = next(iter(plan.runs.values())).data.on_bad_answer
    for data in splits.values():
        data.store(on_bad_answer)
    train_plan(
        plan,
        folder,
        overwrite=overwrite,
        resume=resume,
        auto_batch=auto_batch,
        cache=None if cache is None else Path(os.path.expanduser(cache)),
        log=log or logger.info,
    )
    return Run.load(folder)


def evaluate(
    model: Run | Reader | Mapping[str, str] | PathLike,
    data: Any,
    *,
    out: PathLike | None = None,
    overwrite: bool = False,
    batch_size: int = 32,
    precision: Precision = "auto",
    answerable: float | None = None,
    null_odds: Mapping[str, float] | None = None,
    language: str | None = None,
    metrics: Sequence[str | Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Score a reader, or predictions made elsewhere, by the metric of the official SQuAD 2.0 script.

    >>> evaluate("runs/first", "dev.json")["f1"]
    >>> evaluate({"id1": "Huygens", "id2": ""}, "dev.json")["exact"]

    Args:
        model: A run, a `Reader`, or a name or folder that `Reader.load` takes; or predictions: a dictionary from
            question id to answer ("" for no answer), or the path of such a file.
        data: The questions with their answers, in the same forms as for `train`.
        out: For a model: a run folder for predictions, scores and cost. By default, nothing is written.
        overwrite: Replace the run in `out`.
        batch_size: Windows per batch.
        precision: Number format, as for `Reader.load`; a loaded reader has its own.
        answerable: For a model: the share of the questions that is expected to have an answer, as for `Reader.ask`.
        null_odds: For predictions: the score of no answer minus that of the best answer, by question id.
        language: The language of the metric; by default the contexts decide.
        metrics: Metrics to compute besides exact match and F1: names, or tables with `name` and options.
    """
    from lamella.inference.questions import check_all_read
    from lamella.scoring.evaluate import evaluate as evaluate_model
    from lamella.scoring.evaluate import evaluate_file

    predictions = _predictions(model)
    if predictions is not None and out is not None:
        raise UsageError("evaluate: expected no out for predictions, which are only scored; remove it.")
    if predictions is not None and answerable is not None:
        raise UsageError("evaluate: expected no answerable for predictions, which are decided already; remove it.")
    if predictions is None and null_odds is not None:
        raise UsageError("evaluate: expected null_odds for predictions only, as a model has its own; remove it.")
    questions: Any = data
    if not isinstance(data, str | os.PathLike):
        paths, records = split_paths(data)
        if paths:
            questions = list(dict.fromkeys(os.fspath(path) for path in paths))
        elif out is None:
            dataset = load_examples(records, on_bad_answer="ignore", labelled=True)
            check_all_read(dataset)
            questions = dataset.examples
        else:
            folder = Path(os.path.expanduser(out))
            runs.check_run_folder(folder, overwrite=overwrite)
            stored = _Data(records, folder, "dev")
            stored.store("ignore")
            questions = stored.files
    if predictions is not None:
        return evaluate_file(
            questions, predictions, null_odds=null_odds, language=language, metrics=metrics, log=logger.warning
        )
    assert not isinstance(model, Mapping)
    return evaluate_model(
        model,
        questions,
        out=out,
        overwrite=overwrite,
        batch_size=batch_size,
        precision=precision,
        answerable=answerable,
        language=language,
        metrics=metrics,
        log=logger.warning,
    )


def compare(
    *runs: Run | PathLike | Iterable[Run | PathLike],
    data: PathLike | None = None,
    baseline: Run | PathLike | None = None,
) -> Comparison:
    """Compare runs: quality, cost, and which differences are larger than chance.

    >>> print(compare("runs/first", "runs/second", baseline="first"))

    Args:
        *runs: Runs or their folders, or lists of them. A run that holds several stands for all of them, and runs that
            differ only in their seeds count as one reader.
        data: The file that the runs were scored on, if they do not record it or it has moved.
        baseline: The run to compare the others with, by name, folder or object; by default the first.
    """
    from lamella.study.compare import compare as compare_runs

    expected = "compare: expected runs or their folders"
    folders = list(flatten_paths(runs, expected))
    if not folders:
        raise UsageError(f"{expected}, got none.")
    return compare_runs(
        folders,
        data=None if data is None else os.fspath(data),
        baseline=None if baseline is None else os.fspath(baseline),
    )


def report(
    *runs: Run | PathLike | Iterable[Run | PathLike],
    out: PathLike,
    data: PathLike | None = None,
    title: str | None = None,
    paper: str | None = None,
    layers: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a report about runs: an HTML file with plots, tables and sample answers, or tables in Markdown.

    >>> report("runs/pce-table2", out="pce-table2.md", paper="pce-table2")["tables"][0]["findings"]

    Args:
        *runs: Runs, their folders, result files, folders of them, or lists of these.
        out: The file to write; its suffix chooses the format: `.html` or `.md`.
        data: The file that the runs were scored on, if they do not record it or it has moved.
        title: The heading.
        paper: The id of a published table (`"pce-table2"`) or paper (`"pce"`) to compare the runs with, or `"all"`.
        layers: Show the layers that the sample answers of an HTML report were read from; runs the models.
        overwrite: Replace an existing file.

    Returns:
        A summary of what was written; with `paper`, also the rows and the verdicts of its tables.
    """
    from lamella.study.report.write import write_report

    return write_report(
        list(flatten_paths(runs, "report: expected runs, their folders or result files")),
        Path(os.path.expanduser(out)),
        data=None if data is None else os.fspath(data),
        title=title,
        paper=paper,
        layers=layers,
        overwrite=overwrite,
    )


def _read_config(config: RunConfig | Mapping[str, Any] | PathLike | None) -> tuple[dict[str, Any], str]:
    """Return the sections of a run file, however they are given, and their name in error messages."""
    if config is None:
        return {}, "train"
    if isinstance(config, RunConfig):
        return config.model_dump(mode="json", exclude_unset=True), "config"
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config)), "config"
    path = Path(os.path.expanduser(config))
    return read_table(path), str(path)


def _override(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with options on top; if it has several learners or runs, each of them gets the options."""
    merged = dict(table)
    for section, options in overrides.items():
        earlier = merged.get(section)
        if isinstance(earlier, list) and isinstance(options, Mapping):
            merged[section] = [
                merge_tables(entry, options) if isinstance(entry, Mapping) else entry for entry in earlier
            ]
        else:
            merged = merge_tables(merged, {section: options})
    if isinstance(entries := merged.get("run"), list) and "run" not in overrides:
        merged["run"] = [_override(entry, overrides) if isinstance(entry, Mapping) else entry for entry in entries]
    return merged


def _predictions(model: Any) -> Path | Mapping[str, str] | None:
    """Return predictions that were passed instead of a model: a dictionary, or a file; models are folders or names."""
    if isinstance(model, Mapping):
        return model
    path = Path(os.path.expanduser(model)) if isinstance(model, str | os.PathLike) else None
    return path if path is not None and path.is_file() else None


class _Data:
    """Data that was passed for a split: files, or records in memory, which are stored in the run folder."""

    def __init__(self, data: Any, folder: Path, split: str) -> None:
        paths, self.records = split_paths(data)
        self.split, self.path = split, runs.stored_data(folder, split)
        self.files = [os.fspath(path) for path in paths] or [str(self.path)]

    def store(self, on_bad_answer: OnBadAnswer) -> None:
        """Check records in memory and write them into the run folder."""
        if self.records is not None:
            name = f"<{self.split}>"
            dataset = load_examples(self.records, on_bad_answer=on_bad_answer, labelled=True, name=name)
            if on_bad_answer == "ignore":
                from lamella.inference.questions import check_all_read

                check_all_read(dataset)
            write_flat(dataset.examples, self.path)
