"""The questions that a threshold is tuned on: their scores, their files, and what was fitted without each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lamella.calibration import Calibration, TunedOn
from lamella.data.examples import Example
from lamella.inference.abstention import FEATURES, feature_table, log_odds
from lamella.inference.no_answer import Floats, na_probability
from lamella.inference.prediction import NO_SPAN, Prediction
from lamella.scoring.best_answers import null_odds_of, score_best_answers
from lamella.scoring.feature_fit import fit_features
from lamella.scoring.metrics import QuestionScores
from lamella.scoring.risk_coverage import area, coverage_at
from lamella.scoring.threshold import (
    Bools,
    Method,
    assign_folds,
    break_even,
    expected_calibration_error,
    fit_isotonic,
    fit_temperature,
    with_a_span,
)
from lamella.scoring.worst_file import fit_to_worst

LEAST_OF_A_FILE = 50  # questions of each kind, if the calibration is to be fitted to the worst of several files
LEAST = 10  # questions of each kind; with fewer, a cross-fitted score is mostly chance
LONG, LEAST_LONG = 4, 50  # windows of a long text, and how many such texts show the effect of length
ACCURACY = 0.8  # for the coverage that is reported


@dataclass(frozen=True)
class CrossFitted:
    """What was decided about each question by a threshold and a calibration fitted without its fold."""

    odds: Floats  # null odds, or calibrated log-odds
    probability: Floats  # of "no answer"
    withheld: Bools  # not answered

    def only(self, where: Bools) -> CrossFitted:
        """Return the questions at `where`."""
        return CrossFitted(self.odds[where], self.probability[where], self.withheld[where])


@dataclass(frozen=True)
class Sample:
    """Questions with the scores of their best answers, their null odds and features, their files and folds."""

    scores: QuestionScores
    null_odds: Floats
    table: Floats  # features [N, F]
    files: NDArray[np.int64]  # the number of the file of each question
    folds: NDArray[np.int64] | None  # the files, or articles of a single file; None if there is nothing to split
    articles: NDArray[np.int64] | None  # folds of articles
    tuned_on: TunedOn
    gives_text: bool

    @classmethod
    def build(
        cls,
        examples: Sequence[Example],
        predictions: Mapping[str, Prediction],
        tuned_on: TunedOn,
        *,
        files: Sequence[int] | None = None,
        gives_text: bool = True,
        language: str = "en",
    ) -> Sample:
        """Score the predictions; the folds are the files, or, of a single file, its articles."""
        numbers = np.zeros(len(examples), np.int64) if files is None else np.array(files, np.int64)
        scores = score_best_answers(examples, predictions, gives_text=gives_text, language=language)
        table = feature_table([predictions[example.id] for example in examples])
        articles = assign_folds(examples)
        folds = numbers if numbers.any() else articles
        # From the scores: the null odds of a model that is calibrated by features are its log-odds.
        odds = table[:, list(FEATURES).index("null_odds")] if gives_text else null_odds_of(examples, predictions)
        return cls(scores, odds, table, numbers, folds, articles, tuned_on, gives_text)

    @property
    def unanswerable(self) -> Bools:
        return ~self.scores.answerable

    @property
    def weights(self) -> Floats:
        """The weight of each question: every file counts the same."""
        sizes = np.bincount(self.files)
        weights: Floats = len(self.files) / (np.count_nonzero(sizes) * sizes[self.files])
        return weights

    @property
    def answerable_share(self) -> float:
        """The share of answerable questions, as a mean over the files."""
        return self.mean(lambda of_file: float(self.scores.answerable[of_file].mean()))

    @property
    def doubt(self) -> str | None:
        """The reason, if there is one, why these questions cannot show that something is better on others."""
        return _doubt(self.scores.answerable, self.folds)

    def was_used_for(self, tuned_on: TunedOn | None) -> bool:
        """Whether something was tuned on these very questions; its scores on them would be too good to compare with."""
        return tuned_on is not None and tuned_on.sha256 == self.tuned_on.sha256

    def only(self, where: Bools) -> Sample:
        """Return the questions at `where`, without folds."""
        return replace(
            self,
            scores=self.scores.only(where),
            null_odds=self.null_odds[where],
            table=self.table[where],
            files=self.files[where],
            folds=None,
            articles=None,
        )

    def odds(self, calibration: Calibration | None, window_penalty: float = 0.0) -> Floats:
        """Return what is compared with a model's threshold: null odds, or with the method features the log-odds."""
        if calibration is None or calibration.method != "features":
            return self.null_odds + window_penalty * self._doublings
        columns = [tuple(FEATURES).index(feature.name) for feature in calibration.features]
        return log_odds(self.table[:, columns], calibration)

    def by_article(self) -> Sample:
        """Return the questions with articles as folds, so that every fold has texts of each file and length."""
        return replace(self, folds=self.articles)

    def penalised(self, window_penalty: float) -> Sample:
        """Return the questions with the penalty for long texts added to their null odds."""
        return replace(self, null_odds=self.odds(None, window_penalty)) if window_penalty else self

    def window_penalty(self, *, least_long: int = LEAST_LONG) -> float:
        """Fit the penalty: how much higher the null odds must be, per doubling of the windows, for the same chances.

        In a logistic regression on null odds and windows, it is the ratio of the two slopes; 0 if more windows do not
        make false answers likelier, if the null odds mean nothing, or if fewer than `least_long` texts are long.
        """
        names = ("null_odds", "windows")
        columns = [tuple(FEATURES).index(name) for name in names]
        spans = self.null_odds < -NO_SPAN / 2
        if not self.gives_text or (self._doublings[spans] >= math.log2(LONG)).sum() < least_long:
            return 0.0
        fitted = fit_features(
            self.table[spans][:, columns], self.unanswerable[spans], self.weights[spans], names
        ).features
        by_odds, by_windows = (feature.weight / feature.scale for feature in fitted)
        return max(0.0, by_windows / by_odds * math.log(2)) if by_odds > 0 else 0.0

    @property
    def _doublings(self) -> Floats:
        """How often one window must be doubled to give as many as were read."""
        doublings: Floats = self.table[:, tuple(FEATURES).index("windows")] / math.log(2)
        return doublings

    def calibration(self, method: Method) -> Calibration:
        """Fit the probability of "no answer"."""
        fitted = {"answerable": self.answerable_share, "fitted_on": self.tuned_on}
        return self._fit(method).model_copy(update=fitted)

    def _fit(self, method: Method) -> Calibration:
        if method == "features":
            chosen = with_a_span(self.null_odds)
            return fit_features(self.table[chosen], self.unanswerable[chosen], self.weights[chosen], tuple(FEATURES))
        if method == "temperature" and self._has_large_files:
            return fit_to_worst(self.null_odds, self.unanswerable, self.files)
        fit = fit_temperature if method == "temperature" else fit_isotonic
        return fit(self.null_odds, self.unanswerable, self.weights)

    @property
    def _has_large_files(self) -> bool:
        """Whether there are several files, each with enough questions to show how well it is calibrated."""
        kinds = [np.bincount(self.unanswerable[self.files == number], minlength=2) for number in np.unique(self.files)]
        return len(kinds) > 1 and min(int(of_file.min()) for of_file in kinds) >= LEAST_OF_A_FILE

    def threshold(self, method: Method) -> float:
        """Return the threshold with the best expected F1; with the method features, log-odds of 0: one half."""
        return 0.0 if method == "features" else break_even(self.scores, self.null_odds, self.weights)

    def cross_fit(self, method: Method, *, penalise: bool = False) -> CrossFitted:
        """Fit threshold and calibration for every fold on the others; with `penalise`, the penalty as well."""
        odds, probability = np.zeros(len(self.files)), np.zeros(len(self.files))
        withheld = np.zeros(len(self.files), np.bool_)
        for held_out, others, penalty in self._without_each_fold(penalise):
            calibration = others._fit(method)
            odds[held_out] = self.only(held_out).odds(calibration, penalty)
            probability[held_out] = na_probability(odds[held_out], calibration)
            withheld[held_out] = odds[held_out] > others.threshold(method)
        return CrossFitted(odds, probability, withheld)

    def cross_fit_threshold(self, method: Method, *, penalise: bool = False) -> Bools:
        """Return which questions are not answered, without fitting a calibration; not for the method features."""
        withheld = np.zeros(len(self.files), np.bool_)
        for held_out, others, penalty in self._without_each_fold(penalise):
            withheld[held_out] = self.only(held_out).odds(None, penalty) > others.threshold(method)
        return withheld

    def _without_each_fold(self, penalise: bool) -> Iterator[tuple[Bools, Sample, float]]:
        """Yield the questions of each fold, the other questions with their penalty, and that penalty."""
        assert self.folds is not None
        for fold in range(int(self.folds.max()) + 1):
            held_out = self.folds == fold
            others = self.only(~held_out)
            penalty = others.window_penalty(least_long=1) if penalise else 0.0  # all folds together have enough
            yield held_out, others.penalised(penalty), penalty

    def mean(self, measure: Callable[[Bools], float]) -> float:
        """Return the mean of a measure over the files."""
        return float(np.mean([measure(self.files == number) for number in np.unique(self.files)]))

    def percent(self, form: str, withheld: Bools) -> dict[str, float]:
        """Return exact match and F1; for a model without texts, the accuracy of its abstaining."""
        scores = self.scores.withheld(withheld)
        values = (
            {"exact": scores.exact, "f1": scores.f1} if self.gives_text else {"answerability_accuracy": scores.exact}
        )

        def mean(value: Floats) -> float:
            return self.mean(lambda of_file: 100.0 * float(value[of_file].sum()) / int(of_file.sum()))

        return {form.format(key): mean(value) for key, value in values.items()}

    def calibration_error(self, probability: Floats) -> float:
        """Return the expected calibration error, in percent, as a mean over the files."""
        return float(np.mean(self.calibration_errors(probability)))

    def calibration_errors(self, probability: Floats) -> list[float]:
        """Return the expected calibration error of each file, in percent."""
        return [
            100 * expected_calibration_error(probability[self.files == number], self.unanswerable[self.files == number])
            for number in np.unique(self.files)
        ]

    def measure(self, found: CrossFitted) -> dict[str, float]:
        """Return how good cross-fitted decisions are, in percent: by F1, risk and coverage, and calibration error."""
        answered = np.where(self.scores.answerable, self.scores.f1, 0.0)  # as if every question were answered
        return {
            **self.percent("{}", found.withheld),
            "aurc": self.mean(lambda of_file: 100 * area(-found.odds[of_file], answered[of_file])),
            f"coverage_at_{100 * ACCURACY:.0f}": self.mean(
                lambda of_file: 100 * coverage_at(-found.odds[of_file], answered[of_file], accuracy=ACCURACY)
            ),
            "ece": self.calibration_error(found.probability),
        }


def doubt_about(examples: Sequence[Example]) -> str | None:
    """Return the reason, if there is one, why these examples cannot show that a threshold is better on others."""
    return _doubt(np.array([example.answerable for example in examples], np.bool_), assign_folds(examples))


def _doubt(answerable: Bools, folds: NDArray[np.int64] | None) -> str | None:
    if min(int(answerable.sum()), int((~answerable).sum())) < LEAST:
        return f"at least {LEAST} questions of each kind are needed to show that it is better"
    if folds is None:
        return "all questions share one context, so the scores on new texts cannot be estimated"
    return None
