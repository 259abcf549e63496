"""Tune the threshold and calibration of a model on its predictions, and report their effect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions, TunedOn
from lamella.data.examples import Example
from lamella.errors import DataError, counted
from lamella.inference.no_answer import Floats, na_probability
from lamella.inference.predict import predict
from lamella.inference.prediction import Prediction
from lamella.inference.protocols import QAModel
from lamella.scoring.best_answers import null_odds_of, score_best_answers
from lamella.scoring.metrics import QuestionScores, language_of
from lamella.scoring.threshold import (
    Method,
    assign_folds,
    cross_calibrate,
    cross_fit,
    expected_calibration_error,
    fit_calibration,
    tune,
)

SHORT = {"exact": "EM", "f1": "F1", "answerability_accuracy": "accuracy"}
LEAST = 10  # questions of each kind; with fewer, a cross-fitted score is mostly chance
ENOUGH = 100  # questions of each kind; with fewer, a threshold is uncertain and isotonic regression overfits


@dataclass(frozen=True)
class Tuned:
    """Decoding options with a tuned threshold and calibration, and a report of their effect, in percent.

    The options differ from those before only where the change is better on articles that it was not tuned on:
    `threshold_choice` and `calibration_choice` of the report are `tuned`, `kept` (with a reason) or `forced`.
    """

    decoding: DecodingOptions
    report: dict[str, Any]

    @property
    def kept(self) -> bool:
        """Whether something that was tuned is not used, because it is not known to be better."""
        return "kept" in (self.report["threshold_choice"], self.report["calibration_choice"])

    def summary(self) -> list[str]:
        """Return the threshold that is used, with the reason if it is not the tuned one, and a warning if in doubt."""
        report = self.report
        lines = [f"threshold {report['threshold']:.4f}, tuned on {counted(report['questions'], 'question')}"]
        if report["threshold_choice"] == "kept":
            found = f"kept instead of {report['threshold_tuned']:.4f}, tuned on"
            lines = [
                f"threshold {report['threshold']:.4f} {found} {counted(report['questions'], 'question')}: "
                f"{report['threshold_reason']}"
            ]
        if min(report["answerable"], report["unanswerable"]) < ENOUGH:
            lines.append(
                f"few questions ({report['answerable']} answerable, {report['unanswerable']} unanswerable): the tuned "
                f"threshold is uncertain; {ENOUGH} of each kind would be enough"
            )
        return lines

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        report, metrics = self.report, ("exact", "f1") if "f1_at_0" in self.report else ("answerability_accuracy",)

        def scores(key: str) -> str:
            return "  ".join(f"{SHORT[metric]} {report[key.format(metric)]:.2f}" for metric in metrics)

        lines = [*self.summary(), f"at threshold 0:  {scores('{}_at_0')}"]
        if "threshold_before" in report:
            lines.append(
                f"before:          {scores('{}_before')}  (at {report['threshold_before']:.4f}, its threshold)"
            )
        lines.append(f"in-sample:       {scores('{}_in_sample')}  (on the questions it was tuned on: too optimistic)")
        if "crossfit_ece" in report:
            lines.append(
                f"cross-fitted:    {scores('crossfit_{}')}  (each article tuned on the others: what to expect)"
            )
        errors = [f"{report['ece_uncalibrated']:.2f} % uncalibrated"]
        if "ece_before" in report:
            errors.append(f"{report['ece_before']:.2f} % before")
        if "crossfit_ece" in report:
            errors.append(f"{report['crossfit_ece']:.2f} % calibrated (cross-fitted)")
        lines.append(f"calibration error of the probability of no answer: {', '.join(errors)}")
        if report["calibration_choice"] == "kept":
            lines.append(f"calibration kept as it was: {report['calibration_reason']}")
        return lines


def calibrate_model(
    model: QAModel,
    examples: Sequence[Example],
    data: str,
    *,
    method: Method = "temperature",
    force: bool = False,
    batch_size: int = 32,
) -> Tuned:
    """Tune the threshold and calibration of a model on some examples; nothing is written. `data` names their file."""
    check_tunable(examples, [data], method)
    return tune_decoding(
        model.decoding,
        examples,
        predict(model, examples, batch_size=batch_size),
        data=[data],
        method=method,
        force=force,
        gives_text=model.gives_text,
        language=language_of(examples),
    )


def tune_decoding(
    decoding: DecodingOptions,
    examples: Sequence[Example],
    predictions: Mapping[str, Prediction],
    *,
    data: Sequence[str],
    method: Method = "temperature",
    force: bool = False,
    gives_text: bool = True,
    language: str = "en",
) -> Tuned:
    """Tune the threshold for the best F1 on some examples, and fit the calibration to them.

    Each replaces what `decoding` has only if it is better when cross-fitted; with `force`, always.
    """
    check_tunable(examples, data, method)
    names = ", ".join(Path(name).name for name in data)
    sample = _Sample(
        score_best_answers(examples, predictions, gives_text=gives_text, language=language),
        null_odds_of(examples, predictions),
        assign_folds(examples),
        TunedOn(data=names, questions=len(examples), sha256=fingerprint(examples)),
        gives_text,
    )
    threshold, threshold_report = _choose_threshold(sample, decoding, force)
    calibration, calibration_report = _choose_calibration(sample, decoding, method, force)
    counts = {"answerable": int(sample.scores.answerable.sum()), "unanswerable": int(sample.unanswerable.sum())}
    report = {"data": names, "questions": len(examples), **counts, **threshold_report, **calibration_report}
    return Tuned(decoding.model_copy(update={**threshold, **calibration}), report)


@dataclass(frozen=True)
class _Sample:
    """The questions to tune on: the scores of their best answers, their null odds and their folds."""

    scores: QuestionScores
    odds: Floats
    folds: NDArray[np.int64] | None
    tuned_on: TunedOn
    gives_text: bool

    @property
    def unanswerable(self) -> NDArray[np.bool_]:
        return ~self.scores.answerable

    @property
    def doubt(self) -> str | None:
        """The reason, if there is one, why these questions cannot show that something is better on others."""
        least = min(int(self.scores.answerable.sum()), int(self.unanswerable.sum()))
        if least < LEAST:
            return f"at least {LEAST} questions of each kind are needed to show that it is better"
        if self.folds is None:
            return "all questions share one context, so the scores on new texts cannot be estimated"
        return None

    def score_at(self, form: str, threshold: float) -> dict[str, float]:
        return _percent(form, self.scores.withheld(self.odds > threshold), self.gives_text)

    def calibration_error(self, probability: Floats) -> float:
        return 100 * expected_calibration_error(probability, self.unanswerable)

    def was_used_for(self, tuned_on: TunedOn | None) -> bool:
        """Whether something was tuned on these very questions; its scores on them would be too good to compare with."""
        return tuned_on is not None and tuned_on.sha256 == self.tuned_on.sha256


def _choose_threshold(sample: _Sample, decoding: DecodingOptions, force: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the threshold with its origin, and the report: the tuned one, or the better of 0 and the one before."""
    tuned, before = tune(sample.scores, sample.odds), decoding.null_score_diff_threshold
    report: dict[str, Any] = {"threshold_tuned": tuned, **sample.score_at("{}_at_0", 0.0)}
    metric = "f1" if sample.gives_text else "answerability_accuracy"
    best, kept, origin = report[f"{metric}_at_0"], 0.0, None
    if before != 0 and not sample.was_used_for(decoding.tuned_on):
        report |= {"threshold_before": before, **sample.score_at("{}_before", before)}
        if report[f"{metric}_before"] >= best:
            best, kept, origin = report[f"{metric}_before"], before, decoding.tuned_on
    report |= sample.score_at("{}_in_sample", tuned)
    reason = sample.doubt
    if sample.folds is not None:
        report |= _percent("crossfit_{}", cross_fit(sample.scores, sample.odds, sample.folds), sample.gives_text)
        crossfit = report[f"crossfit_{metric}"]
        if reason is None and crossfit <= best:
            reason = f"its cross-fitted {SHORT[metric]}, {crossfit:.2f}, is not better than {best:.2f}"
    choice = _choice(reason, force)
    value, tuned_on = (kept, origin) if choice == "kept" else (tuned, sample.tuned_on)
    report |= {"threshold": value, "threshold_choice": choice, "threshold_reason": reason}
    return {"null_score_diff_threshold": value, "tuned_on": tuned_on}, report


def _choose_calibration(
    sample: _Sample, decoding: DecodingOptions, method: Method, force: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the calibration and the report: the fitted one, or the better of none and the one before."""
    best, kept = sample.calibration_error(na_probability(sample.odds, None)), None
    report: dict[str, Any] = {"ece_uncalibrated": best}
    if decoding.calibration is not None:
        origin = decoding.calibration.fitted_on or decoding.tuned_on
        if not sample.was_used_for(origin):
            report["ece_before"] = sample.calibration_error(na_probability(sample.odds, decoding.calibration))
            if report["ece_before"] <= best:
                best, kept = report["ece_before"], decoding.calibration.model_copy(update={"fitted_on": origin})
    reason = sample.doubt
    if sample.folds is not None:
        probability = cross_calibrate(sample.odds, sample.unanswerable, sample.folds, method)
        report["crossfit_ece"] = sample.calibration_error(probability)
        if reason is None and report["crossfit_ece"] >= best:
            reason = f"the cross-fitted error, {report['crossfit_ece']:.2f} %, is not better than {best:.2f} %"
    report |= {"calibration_choice": _choice(reason, force), "calibration_reason": reason}
    if report["calibration_choice"] != "kept":
        kept = fit_calibration(sample.odds, sample.unanswerable, method)
        kept = kept.model_copy(update={"fitted_on": sample.tuned_on})
    return {"calibration": kept}, report


def _choice(reason_to_keep: str | None, force: bool) -> Literal["tuned", "forced", "kept"]:
    return "tuned" if reason_to_keep is None else "forced" if force else "kept"


def threshold_report(
    decoding: DecodingOptions, examples: Sequence[Example], scores: QuestionScores, odds: Floats, *, gives_text: bool
) -> dict[str, Any]:
    """Report the effect of a model's threshold and calibration, in percent; `scores` are of its best answers.

    The report has the `threshold`, the scores at threshold 0, the scores with a threshold tuned on the *other* articles
    of the same data (`crossfit_*`; unlike `best_*` not an upper bound), and the expected calibration error of the
    probability of "no answer". Entries that need both kinds of questions, or several contexts, are absent without them.
    """
    report: dict[str, Any] = {"threshold": decoding.null_score_diff_threshold}
    origins = [decoding.tuned_on, decoding.calibration.fitted_on if decoding.calibration else None]
    used = [origin.sha256 for origin in origins if origin is not None]
    if used:
        report["threshold_tuned_on_these"] = fingerprint(examples) in used
    report |= _percent("{}_at_0", scores.withheld(odds > 0), gives_text)
    if len(set(scores.answerable.tolist())) < 2:
        return report
    folds = assign_folds(examples)
    if folds is not None:
        report |= _percent("crossfit_{}", cross_fit(scores, odds, folds), gives_text)
    probability = na_probability(odds, decoding.calibration)
    return report | {"ece": 100 * expected_calibration_error(probability, ~scores.answerable)}


def check_tunable(examples: Sequence[Example], data: Sequence[str], method: Method = "temperature") -> None:
    """Check that the data has both answerable and unanswerable questions, and enough of them for the method."""
    kinds = {example.answerable for example in examples}
    if len(kinds) < 2:
        found = "none" if not kinds else "only answerable ones" if kinds == {True} else "only unanswerable ones"
        raise DataError(
            f"{', '.join(data)}: expected answerable and unanswerable questions to tune a threshold on, found {found}."
        )
    answerable = sum(example.answerable for example in examples)
    if method == "isotonic" and min(answerable, len(examples) - answerable) < ENOUGH:
        raise DataError(
            f"{', '.join(data)}: isotonic regression expected at least {ENOUGH} answerable and {ENOUGH} unanswerable "
            f"questions, found {answerable} and {len(examples) - answerable}; use the method temperature."
        )


def fingerprint(examples: Sequence[Example]) -> str:
    """Return a hash of the question ids that does not depend on their order."""
    return hashlib.sha256(json.dumps(sorted(example.id for example in examples)).encode()).hexdigest()


def _percent(name: str, scores: QuestionScores, gives_text: bool) -> dict[str, float]:
    """Return exact match and F1; for a model without texts, the accuracy of its abstaining."""
    values = {"exact": scores.exact, "f1": scores.f1} if gives_text else {"answerability_accuracy": scores.exact}
    return {name.format(key): 100.0 * float(value.sum()) / len(value) for key, value in values.items()}
