"""The published values of the papers: tables with their rows, and what the authors concluded from them.

The values are in `published/PAPER.toml`. Scores are in percent, times in seconds. A row has the name of
its run in `configs/papers`, or of a derived row there.
"""

from __future__ import annotations

import functools
import math
import tomllib
from importlib import resources
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from lamella.errors import ConfigError, UsageError
from lamella.option_errors import explain
from lamella.section import Section

PAPERS = ("pce", "bertvision", "efficiency", "korquad")
ALL = "all"  # the id of the summary of all papers

# What a finding compares, and how a page calls it. Higher is better, except for costs.
SCORE_METRICS = {
    "f1": "F1",
    "exact": "EM",
    "HasAns_exact": "EM, answerable",
    "NoAns_exact": "EM, unanswerable",
    "question_f1": "F1 per question",
    "question_exact": "EM per question",
}
CROSSFIT_METRICS = {"crossfit_f1": "F1, cross-fitted", "question_crossfit_f1": "F1 per question, cross-fitted"}
EFFICIENCY = "efficiency"  # (F1 - 50) / log10(trained parameters)
DISTILLATION = "distillation_loss"  # the distance to the teacher at the end of training
LOSS = "loss"  # of training, at its end
COST_METRICS = {  # compared by their ratio; lower is better
    "trainable_parameters": "parameters",
    "train_seconds": "train s",
    "inference_seconds_per_1000": "ms/question",
    DISTILLATION: "last distillation loss",
    LOSS: "last training loss",
}
LOWEST_ACCURACY, MEAN_LAYER = "lowest_accuracy", "mean_layer"
RUN_METRICS = {  # a number per run, compared seed by seed
    LOWEST_ACCURACY: "lowest accuracy of all epochs",
    MEAN_LAYER: "mean layer by weight",
}
METRICS = {
    **SCORE_METRICS,
    **CROSSFIT_METRICS,
    EFFICIENCY: "(F1 − 50) / log10(parameters)",
    **COST_METRICS,
    **RUN_METRICS,
}
Metric = Literal[
    "f1",
    "exact",
    "HasAns_exact",
    "NoAns_exact",
    "question_f1",
    "question_exact",
    "efficiency",
    "trainable_parameters",
    "train_seconds",
    "inference_seconds_per_1000",
    "distillation_loss",
    "loss",
    "lowest_accuracy",
    "mean_layer",
]


class PublishedRow(Section):
    """A row of a table, with the values that the authors published."""

    label: str = Field(min_length=1)  # as printed
    run: str = Field(min_length=1)  # its run in the table's run file, or FILE/RUN for a run of another one
    f1: float | None = None
    exact: float | None = None
    HasAns_exact: float | None = None
    NoAns_exact: float | None = None
    question_f1: float | None = None  # where questions have several contexts: of the best answer from all of them
    question_exact: float | None = None
    loss: float | None = None
    trainable_parameters: int | None = None
    trainable_percent: float | None = None  # of the encoder
    train_seconds: float | None = None
    inference_seconds: float | None = None  # for all questions of the paper's dev set
    seeds: int = 1
    note: str = ""
    misprint: str = ""

    @property
    def run_name(self) -> str:
        """The name of its run, without the run file."""
        return self.run.rpartition("/")[2]

    def value(self, metric: str) -> float | None:
        """Return the published value of a metric; None if the authors give none."""
        if metric == EFFICIENCY:
            if self.f1 is None or self.trainable_parameters is None:
                return None
            return (self.f1 - 50) / math.log10(self.trainable_parameters)
        if metric == DISTILLATION or metric in RUN_METRICS:
            return None  # only drawn
        if metric == "inference_seconds_per_1000":
            metric = "inference_seconds"  # on the same questions for all rows of a table, so that the sign is the same
        value: float | None = getattr(self, metric)
        return value


class Finding(Section):
    """A conclusion of the authors, as something that runs can decide: which row is better than which.

    Either `better` is better than each row of `worse`, or the rows of `order` are each better than the next. With a
    `margin`, "better" means "at most so much worse": that is how "as good as" is decided. The margin is in points; of a
    cost, it is a share. Costs that are `alike` are within it in both directions.
    """

    text: str = Field(min_length=1)
    better: str | None = None
    worse: list[str] = Field(default=[])
    order: list[str] = Field(default=[])
    metric: Metric = "f1"
    margin: float = Field(default=0.0, ge=0)
    alike: bool = False
    crossfit: bool = False  # also compared with cross-fitted thresholds, which decide nothing about the finding
    about: Literal["encoder"] | None = (
        None  # what the rows must differ in: with one encoder, there is nothing to decide
    )
    note: str = ""

    @model_validator(mode="after")
    def _compares_rows(self) -> Finding:
        if bool(self.better and self.worse) == bool(self.order) or len(self.order) == 1:
            raise ValueError("either better and worse, or an order of at least two rows")
        if self.alike and (self.metric not in COST_METRICS or not self.margin):
            raise ValueError("a cost and a margin within which rows are alike")
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The comparisons that decide it: the better row and the worse one."""
        if self.better:
            return [(self.better, worse) for worse in self.worse]
        return list(zip(self.order, self.order[1:], strict=False))


class Protocol(Section):
    """How the authors scored their readers, in words."""

    metric: str = "EM and F1 of the official SQuAD 2.0 script"
    threshold: str
    encoder: str
    train: str
    training: str
    dev: str
    seeds: str = "one seed"


class PublishedTable(Section):
    """A table or figure of a paper."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    title: str
    run_file: str  # in configs/papers, without suffix
    task: Literal["span", "answerability"] = "span"
    text: str = ""
    protocol: Protocol
    row: list[PublishedRow] = Field(min_length=1)
    finding: list[Finding] = Field(default=[])

    @model_validator(mode="after")
    def _names_its_rows(self) -> PublishedTable:
        names = [row.run for row in self.row]
        if len(set(names)) < len(names):
            raise ValueError("rows with different runs")
        for finding in self.finding:
            if unknown := {name for pair in finding.pairs for name in pair} - set(names):
                raise ValueError(f"findings about rows of the table, not {', '.join(sorted(unknown))}")
        return self

    def run_file_of(self, row: PublishedRow) -> str:
        """Return the run file that has the run of a row."""
        return row.run.rpartition("/")[0] or self.run_file


class Paper(Section):
    """A paper with its tables."""

    id: str
    title: str
    authors: str
    text: str = ""
    protocol: dict[str, str] = Field(default={})  # of tables that state nothing else
    table: list[PublishedTable]


@functools.cache
def read_paper(name: str) -> Paper:
    """Read the published values of a paper."""
    file = resources.files("lamella.study.papers") / "published" / f"{name}.toml"
    content = tomllib.loads(file.read_text("utf-8"))
    shared = content.get("protocol", {})
    for table in content["table"]:
        table["protocol"] = {**shared, **table.get("protocol", {})}
    try:
        return Paper.model_validate(content)
    except ValidationError as error:
        raise ConfigError(file.name, explain(error, content, Paper)) from None


def find_tables(id: str) -> tuple[Paper, list[PublishedTable]]:
    """Return the table of an id, such as `pce-table2`, or all tables of a paper, such as `pce`."""
    for name in PAPERS:
        if id == name:
            return read_paper(name), read_paper(name).table
        for table in read_paper(name).table if id.startswith(f"{name}-") else []:
            if id == table.id:
                return read_paper(name), [table]
    raise UsageError(f"--paper: expected {ALL}, a paper or one of its tables ({', '.join(known_ids())}), got {id!r}.")


def known_ids() -> list[str]:
    """Return the ids of the papers, each followed by the ids of its tables."""
    return [id for name in PAPERS for id in (name, *(table.id for table in read_paper(name).table))]


@functools.cache
def known_run_files() -> list[str]:
    """Return the names of the run files in `configs/papers` that have rows of a table."""
    tables = [table for name in PAPERS for table in read_paper(name).table]
    return sorted({table.run_file_of(row) for table in tables for row in table.row})
