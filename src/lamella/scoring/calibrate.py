"""Tune the threshold and calibration of a model on its predictions, and report their effect."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.config import DecodingOptions, TunedOn
from lamella.data.examples import Example
from lamella.encoder.sources import is_saved_model, model_folder
from lamella.errors import DataError, UsageError, counted
from lamella.files import same_file
from lamella.inference.no_answer import Floats, na_probability
from lamella.inference.predict import predict
from lamella.inference.prediction import Prediction
from lamella.inference.protocols import QAModel
from lamella.run_file import load_config
from lamella.runs import CONFIG, run_state
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
from lamella.validation import THRESHOLD_OVERLAP

SHORT = {"exact": "EM", "f1": "F1", "answerability_accuracy": "accuracy"}


@dataclass(frozen=True)
class Tuned:
    """Decoding options with a tuned threshold and calibration, and a report of their effect, in percent."""

    decoding: DecodingOptions
    report: dict[str, Any]

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        report, metrics = self.report, ("exact", "f1") if "f1_at_0" in self.report else ("answerability_accuracy",)

        def scores(key: str) -> str:
            return "  ".join(f"{SHORT[metric]} {report[key.format(metric)]:.2f}" for metric in metrics)

        lines = [f"threshold {report['threshold']:.4f}, tuned on {counted(report['questions'], 'question')}"]
        lines.append(f"at threshold 0:  {scores('{}_at_0')}")
        lines.append(f"in-sample:       {scores('{}_in_sample')}  (on the questions it was tuned on: too optimistic)")
        error = f"calibration error of the probability of no answer: {report['ece_uncalibrated']:.2f} % uncalibrated"
        if "crossfit_ece" not in report:
            return [*lines, error, "all questions share one context, so the scores on new texts cannot be estimated"]
        lines.append(f"cross-fitted:    {scores('crossfit_{}')}  (each article tuned on the others: what to expect)")
        return [*lines, f"{error}, {report['crossfit_ece']:.2f} % calibrated (cross-fitted)"]


def calibrate_model(
    model: QAModel,
    examples: Sequence[Example],
    data: str,
    *,
    method: Method = "temperature",
    batch_size: int = 32,
) -> Tuned:
    """Tune the threshold and calibration of a model on some examples; nothing is written. `data` names their file."""
    check_tunable(examples, [data])
    return tune_decoding(
        model.decoding,
        examples,
        predict(model, examples, batch_size=batch_size),
        data=[data],
        method=method,
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
    gives_text: bool = True,
    language: str = "en",
) -> Tuned:
    """Tune the threshold for the best F1 on some examples, and fit the calibration to them."""
    check_tunable(examples, data)
    scores = score_best_answers(examples, predictions, gives_text=gives_text, language=language)
    odds = null_odds_of(examples, predictions)
    threshold = tune(scores, odds)
    calibration = fit_calibration(odds, ~scores.answerable, method)
    names = [Path(name).name for name in data]
    tuned_on = TunedOn(data=", ".join(names), questions=len(examples), sha256=fingerprint(examples))
    report: dict[str, Any] = {"questions": len(examples), "threshold": threshold}
    report |= _percent("{}_at_0", scores.withheld(odds > 0), gives_text)
    report |= _percent("{}_in_sample", scores.withheld(odds > threshold), gives_text)
    report["ece_uncalibrated"] = 100 * expected_calibration_error(na_probability(odds, None), ~scores.answerable)
    folds = assign_folds(examples)
    if folds is not None:
        report |= _percent("crossfit_{}", cross_fit(scores, odds, folds), gives_text)
        probability = cross_calibrate(odds, ~scores.answerable, folds, method)
        report["crossfit_ece"] = 100 * expected_calibration_error(probability, ~scores.answerable)
    update = {"null_score_diff_threshold": threshold, "calibration": calibration, "tuned_on": tuned_on}
    return Tuned(decoding.model_copy(update=update), report)


def threshold_report(
    decoding: DecodingOptions, examples: Sequence[Example], scores: QuestionScores, odds: Floats, *, gives_text: bool
) -> dict[str, Any]:
    """Report the effect of a model's threshold and calibration, in percent; `scores` are of its best answers.

    The report has the `threshold`, the scores at threshold 0, the scores with a threshold tuned on the *other* articles
    of the same data (`crossfit_*`; unlike `best_*` not an upper bound), and the expected calibration error of the
    probability of "no answer". Entries that need both kinds of questions, or several contexts, are absent without them.
    """
    report: dict[str, Any] = {"threshold": decoding.null_score_diff_threshold}
    if decoding.tuned_on is not None:
        report["threshold_tuned_on_these"] = decoding.tuned_on.sha256 == fingerprint(examples)
    report |= _percent("{}_at_0", scores.withheld(odds > 0), gives_text)
    if len(set(scores.answerable.tolist())) < 2:
        return report
    folds = assign_folds(examples)
    if folds is not None:
        report |= _percent("crossfit_{}", cross_fit(scores, odds, folds), gives_text)
    probability = na_probability(odds, decoding.calibration)
    return report | {"ece": 100 * expected_calibration_error(probability, ~scores.answerable)}


def folder_to_tune(name: str, data: str) -> Path:
    """Return the folder of a model to store a threshold in; a transformers checkpoint has no place for one.

    Data that the model was trained on is refused: its threshold would not fit new questions.
    """
    path = Path(os.path.expanduser(name))
    folder = model_folder(path)
    if not (os.path.isdir(path) and is_saved_model(folder)):
        raise UsageError(
            f"{name}: expected a Lamella model folder, or a run folder that holds one, to store the threshold in; use "
            "--dry-run to print the threshold of any other model."
        )
    config = folder.parent / CONFIG
    if run_state(folder.parent) is not None and config.is_file():
        trained_on = load_config(config).data.files("train")
        if any(same_file(data, path) for path in trained_on):
            raise UsageError(f"{data}: {folder.parent} was trained on this file; {THRESHOLD_OVERLAP['train']}")
    return folder


def check_tunable(examples: Sequence[Example], data: Sequence[str]) -> None:
    """Check that the data has both answerable and unanswerable questions."""
    kinds = {example.answerable for example in examples}
    if len(kinds) < 2:
        found = "none" if not kinds else "only answerable ones" if kinds == {True} else "only unanswerable ones"
        raise DataError(
            f"{', '.join(data)}: expected answerable and unanswerable questions to tune a threshold on, found {found}."
        )


def fingerprint(examples: Sequence[Example]) -> str:
    """Return a hash of the question ids that does not depend on their order."""
    return hashlib.sha256(json.dumps(sorted(example.id for example in examples)).encode()).hexdigest()


def _percent(name: str, scores: QuestionScores, gives_text: bool) -> dict[str, float]:
    """Return exact match and F1; for a model without texts, the accuracy of its abstaining."""
    values = {"exact": scores.exact, "f1": scores.f1} if gives_text else {"answerability_accuracy": scores.exact}
    return {name.format(key): 100.0 * float(value.sum()) / len(value) for key, value in values.items()}
