"""Facts about how a model was trained: its data, warm start, teachers and results.

They are stored in the model's config.json, so that every copy of the model carries them, and shown on the model card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from lamella.data.examples import Example
from lamella.data.mixture import Mixture
from lamella.decoding_options import Merge
from lamella.errors import ModelError
from lamella.option_errors import explain
from lamella.section import Section


class DataFacts(Section):
    """The size of a data set."""

    files: list[str]  # names without folders
    questions: int
    unanswerable: int
    licences: list[str | None] = Field(default=[])  # one for each file, None where the run file gives none; or empty

    @model_validator(mode="after")
    def _one_licence_for_each_file(self) -> DataFacts:
        if self.licences and len(self.licences) != len(self.files):
            raise ValueError("as many licences as files")  # after "expected", in the error
        return self


class FileShareFacts(Section):
    """The part of a training file in the mixture of an epoch."""

    file: str  # name without folder
    questions: int
    weight: float
    negatives: float
    taken: int  # examples in the first epoch
    unanswerable: int  # of these


class DomainScores(Section):
    """How a reader scores on a data set of another kind than its training data; in percent."""

    data: str  # name of the file, without folder
    sha256: str  # of the sorted question ids
    questions: int
    unanswerable: int
    threshold: float
    merge: Merge = "scores"  # how the windows of long texts competed
    f1: float  # at the reader's threshold
    f1_low: float  # its 95 % interval, by resampling contexts
    f1_high: float
    f1_at_0: float
    best_f1: float  # at the best threshold for these questions: an upper bound
    has_answer_f1: float | None  # of the answerable questions, at the reader's threshold
    no_answer_f1: float | None
    refused: float | None  # share of the answerable questions that got no answer
    refused_eager: float | None = None  # the same share, if answering as `--answer eager`
    coverage_at_80: float  # largest share of the questions that can be answered with a mean F1 of 80
    area_under_risk: float  # mean risk over all coverages
    risk: list[float]  # at coverages of 10, 20, … 100 %
    calibration_error: float | None  # of the probability of no answer; None if all questions are of one kind
    computed: str | None = None  # device, precision and encoder that the answers were computed with; None: not recorded


class Int8Facts(Section):
    """What rounding a reader to int8 changes on a data set; F1 at the reader's threshold, in percent."""

    data: str  # name of the file, without folder
    questions: int
    f1: float  # in fp32
    int8_f1: float
    equal: float  # share of the questions with the same answer


class RoundedBaseFacts(Section):
    """What a reader trained on a rounded copy of its encoder loses on possible originals; in percent."""

    data: str  # name of the file, without folder
    questions: int
    draws: int  # number of originals that were tried
    f1: float  # on the copy, at the reader's threshold
    change: float  # of F1, mean over the draws
    change_low: float  # smallest
    change_high: float  # largest
    changed: float  # share of the questions with another answer, mean over the draws


class TeacherFacts(Section):
    """A teacher: a model, or a run with stored logits and, if known, the model that computed them."""

    run: str | None = None  # the name of the run folder
    model: str | None = None
    sha256: str | None = None  # of the model's weights


class StartFacts(Section):
    """The model of a warm start."""

    model: str
    sha256: str | None = None  # of the model's weights


class AveragedFacts(Section):
    """One of the models that a model is the mean of."""

    model: str
    sha256: str  # of the model's weights
    train: DataFacts | None = None
    mixture: list[FileShareFacts] = Field(default=[])
    fraction: float = 1.0
    mean_of: list[AveragedFacts] = Field(default=[])  # if it is a mean itself

    def trained(self) -> list[AveragedFacts]:
        """Return the models that were trained: this one, or those that it is the mean of."""
        return [model for part in self.mean_of for model in part.trained()] if self.mean_of else [self]


class Facts(Section):
    """Everything that is recorded about a training run."""

    train: DataFacts | None = None
    dev: DataFacts | None = None
    mixture: list[FileShareFacts] = Field(default=[])  # empty: every epoch took all of the training data as it is
    fraction: float = 1.0  # share of the training questions that was used
    start: StartFacts | None = None
    teachers: list[TeacherFacts] = Field(default=[])
    mean_of: list[AveragedFacts] = Field(default=[])  # by `lamella average`
    domains: list[DomainScores] = Field(default=[])  # on other kinds of texts
    int8: Int8Facts | None = None  # None: not measured
    rounded_base: list[RoundedBaseFacts] = Field(default=[])  # by benchmarks/rounded_base.py
    keep: Literal["best", "last"] = "best"  # which checkpoint this is
    results: dict[str, Any] = Field(default={})  # on the dev data
    calibrated: dict[str, Any] = Field(default={})  # the report of `lamella calibrate` on the stored threshold


def data_facts(
    files: Sequence[str], examples: Sequence[Example], licences: Mapping[str, str] = MappingProxyType({})
) -> DataFacts:
    """Count the questions that were read from some files, those about several contexts once."""
    questions = {example.question_id for example in examples}
    answerable = {example.question_id for example in examples if example.answerable}
    return DataFacts(
        files=[PurePath(file).name for file in files],
        questions=len(questions),
        unanswerable=len(questions) - len(answerable),
        licences=[licences.get(file) for file in files] if any(file in licences for file in files) else [],
    )


def mixture_facts(mixture: Mixture | None) -> list[FileShareFacts]:
    """Describe the mixture of the training files."""
    return [
        FileShareFacts(
            file=PurePath(share.file.file).name,
            questions=share.questions,
            weight=share.file.weight,
            negatives=share.file.negatives,
            taken=share.examples,
            unanswerable=share.unanswerable,
        )
        for share in (mixture.shares if mixture is not None else ())
    ]


def read_facts(table: Mapping[str, Any], where: str) -> Facts:
    """Check the facts of a config.json."""
    try:
        return Facts.model_validate(dict(table))
    except ValidationError as error:
        problems = "; ".join(explain(error, table, Facts, "facts"))
        raise ModelError(f"{where}: damaged, or written by another version of lamella: {problems}") from None
