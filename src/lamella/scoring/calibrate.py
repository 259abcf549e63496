"""A model's threshold and calibration: fitted on its predictions, and reported with their effect."""

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
from lamella.errors import DataError, UsageError
from lamella.files import same_file
from lamella.inference.no_answer import na_probability
from lamella.inference.prediction import Prediction
from lamella.inference.protocols import QAModel
from lamella.run_file import load_config
from lamella.runs import CONFIG, run_state
from lamella.scoring.best_answers import null_odds_of, score_best_answers
from lamella.scoring.metrics import QuestionScores, language_of
from lamella.scoring.threshold import (
    Floats,
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
    """Decoding options with their threshold and calibration tuned, and what that does to the scores, in percent."""

    decoding: DecodingOptions
    report: dict[str, Any]

    def lines(self) -> list[str]:
        """The report for people."""
        found, names = self.report, ("exact", "f1") if "f1_at_0" in self.report else ("answerability_accuracy",)

        def told(name: str) -> str:
            return "  ".join(f"{SHORT[key]} {found[name.format(key)]:.2f}" for key in names)

        lines = [f"threshold {found['threshold']:.4f}, tuned on {found['questions']} questions"]
        lines.append(f"at 0:               {told('{}_at_0')}")
        lines.append(f"on the same:        {told('{}_in_sample')}  (tuned on what it is scored on: too good)")
        error = f"calibration error of the probability of no answer: {found['ece_uncalibrated']:.2f} %"
        if "crossfit_ece" not in found:
            return [*lines, error, "all questions share one context: what the tuning is worth elsewhere cannot be said"]
        lines.append(f"on other articles:  {told('crossfit_{}')}  (each tuned on the rest: what to expect)")
        return [*lines, f"{error}, and {found['crossfit_ece']:.2f} % once calibrated, on other articles"]


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
    """The threshold of the best F1 on some examples, and the calibration that fits them."""
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
    """What a scored model's threshold and calibration do, in percent; `scores` are those of its best answers.

    `threshold`, and the scores at 0 in its place; what a threshold tuned on the *other* articles of the same data would
    give (`crossfit_*`: unlike `best_*` no upper bound); the expected calibration error of the probability of "no
    answer". What needs both kinds of questions, or several contexts, is absent without them.
    """
    found: dict[str, Any] = {"threshold": decoding.null_score_diff_threshold}
    if decoding.tuned_on is not None:
        found["threshold_tuned_on_these"] = decoding.tuned_on.sha256 == fingerprint(examples)
    found |= _percent("{}_at_0", scores.withheld(odds > 0), gives_text)
    if len(set(scores.answerable.tolist())) < 2:
        return found
    folds = assign_folds(examples)
    if folds is not None:
        found |= _percent("crossfit_{}", cross_fit(scores, odds, folds), gives_text)
    probability = na_probability(odds, decoding.calibration)
    return found | {"ece": 100 * expected_calibration_error(probability, ~scores.answerable)}


def folder_to_tune(name: str, data: str) -> Path:
    """The folder of a model to store a threshold in; one of transformers has no place for it.

    What its run was trained on is refused: that is no data to tune on.
    """
    path = Path(os.path.expanduser(name))
    folder = model_folder(path)
    if not (os.path.isdir(path) and is_saved_model(folder)):
        raise UsageError(
            f"{name}: expected a model folder of Lamella, or a run folder with one, to store the threshold in. With "
            "--dry-run the threshold of any model is told."
        )
    run = folder.parent / CONFIG
    if run_state(folder.parent) is not None and run.is_file():
        learnt = load_config(run).data.train
        if any(same_file(data, one) for one in learnt):
            raise UsageError(f"{data}: is what {folder.parent} was trained on; {THRESHOLD_OVERLAP['train']}")
    return folder


def check_tunable(examples: Sequence[Example], data: Sequence[str]) -> None:
    """Refuse data that says nothing of when to abstain."""
    kinds = {example.answerable for example in examples}
    if len(kinds) < 2:
        found = "none at all" if not kinds else "only answerable ones" if kinds == {True} else "only unanswerable ones"
        raise DataError(
            f"{', '.join(data)}: expected answerable and unanswerable questions, to tune a threshold between them. "
            f"Found {found}."
        )


def fingerprint(examples: Sequence[Example]) -> str:
    """By which the same questions are known again, in any order."""
    return hashlib.sha256(json.dumps(sorted(example.id for example in examples)).encode()).hexdigest()


def _percent(name: str, scores: QuestionScores, gives_text: bool) -> dict[str, float]:
    """Exact match and F1; of a model without texts both are the accuracy of its abstaining."""
    values = {"exact": scores.exact, "f1": scores.f1} if gives_text else {"answerability_accuracy": scores.exact}
    return {name.format(key): 100.0 * float(value.sum()) / len(value) for key, value in values.items()}


def calibrate_model(
    model: QAModel,
    examples: Sequence[Example],
    data: str,
    *,
    method: Method = "temperature",
    batch_size: int = 32,
) -> Tuned:
    """Tune a model's threshold and calibration on the questions of a file; nothing is written."""
    from lamella.inference.predict import predict
    from lamella.scoring.calibrate import check_tunable, tune_decoding

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
