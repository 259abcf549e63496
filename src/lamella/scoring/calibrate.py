"""Tune the threshold and calibration of a model on its predictions, and report their effect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.calibration import TunedOn
from lamella.data.examples import Example
from lamella.decoding_options import DecodingOptions, Merge
from lamella.errors import DataError, UsageError, counted
from lamella.inference.no_answer import Floats, na_probability
from lamella.inference.predict import predict
from lamella.inference.prediction import Prediction
from lamella.inference.protocols import QAModel
from lamella.scoring.metrics import QuestionScores, language_of
from lamella.scoring.threshold import Method, assign_folds, cross_fit, expected_calibration_error
from lamella.scoring.tuning_choices import (
    SHORT,
    choose_calibration,
    choose_features,
    choose_threshold,
    choose_window_penalty,
)
from lamella.scoring.tuning_sample import Sample

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
        report, questions = self.report, counted(self.report["questions"], "question")
        if "precision" in report:
            questions += f" answered in {report['precision']}"
        lines = [f"threshold {report['threshold']:.4f}, tuned on {questions}"]
        if report.get("features_choice", "kept") != "kept":
            lines = [f"no answer above a probability of 0.5, by features fitted on {questions}"]
        elif report["threshold_choice"] == "kept":
            lines = [
                f"threshold {report['threshold']:.4f} kept instead of {report['threshold_tuned']:.4f}, tuned on "
                f"{questions}: {report['threshold_reason']}"
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

        lines = [*self.summary(), *self._about_penalty(), f"at threshold 0:  {scores('{}_at_0')}"]
        if "threshold_before" in report:
            lines.append(
                f"before:          {scores('{}_before')}  (at {report['threshold_before']:.4f}, its threshold)"
            )
        # The threshold is not the one with the highest score of a sample, so its score there may also be low.
        gained = report[f"{metrics[-1]}_in_sample"] > report[f"{metrics[-1]}_at_0"]
        where = f"on the questions it was tuned on{': too optimistic' if gained else ''}"
        lines.append(f"in-sample:       {scores('{}_in_sample')}  ({where})")
        if "crossfit_ece" in report:
            part = "file" if ", " in report["data"] and not report.get("crossfit_by_article") else "article"
            expect = f"each {part} tuned on the others: what to expect"
            lines.append(f"cross-fitted:    {scores('crossfit_{}')}  ({expect})")
        errors = [f"{report['ece_uncalibrated']:.2f} % uncalibrated"]
        if "ece_before" in report:
            errors.append(f"{report['ece_before']:.2f} % before")
        if "crossfit_ece" in report:
            errors.append(f"{report['crossfit_ece']:.2f} % calibrated (cross-fitted)")
        if "crossfit_ece_worst" in report:
            errors.append(f"{report['crossfit_ece_worst']:.2f} % on the worst file")
        lines.append(f"calibration error of the probability of no answer: {', '.join(errors)}")
        if report["calibration_choice"] == "kept":
            removed = report.get("calibration_removed", False)
            what = "calibration removed, uncalibrated is better" if removed else "calibration kept as it was"
            lines.append(f"{what}: {report['calibration_reason']}")
        return [*lines, *self._comparison()]

    def _about_penalty(self) -> list[str]:
        """Return what is done about long texts."""
        report = self.report
        if report.get("window_penalty"):
            line = f"long texts: null odds rise by {report['window_penalty']:.2f} per doubling of the windows"
            if "window_penalty_f1_with" in report:
                without, with_it = report["window_penalty_f1_without"], report["window_penalty_f1_with"]
                line += f" (cross-fitted F1 {with_it:.2f}, without it {without:.2f})"
            return [line]
        if report.get("window_penalty_choice") == "kept":
            reason = report["window_penalty_reason"]
            return [f"long texts: no penalty instead of {report['window_penalty_tuned']:.2f}: {reason}"]
        return []

    def _comparison(self) -> list[str]:
        """Return how features compare with the threshold alone, for each file and as the mean."""
        if "features_choice" not in self.report:
            return []
        lines = []
        if "compared" in self.report:
            lines = ["features compared with a threshold alone, cross-fitted:"]
            *files, mean = [*list(self.report["compared"].items())[1:], ("mean", self.report["compared"]["mean"])]
            for name, kinds in [*files, mean] if files else [mean]:
                plain, features = kinds["threshold"], kinds["features"]
                shown = [
                    f"{label} {plain[key]:.2f} → {features[key]:.2f}"
                    for label, key in (
                        ("F1", "f1"),
                        ("AURC", "aurc"),
                        ("coverage at 80 %", "coverage_at_80"),
                        ("calibration error", "ece"),
                    )
                ]
                lines.append(f"  {name + ': ' if files else ''}{', '.join(shown)}")
        if self.report["features_choice"] == "kept":
            lines.append(f"features not used: {self.report['features_reason']}")
        return lines


def calibrate_model(
    model: QAModel,
    questions: Mapping[str, Sequence[Example]],
    *,
    method: Method = "temperature",
    force: bool = False,
    merge: Merge | None = None,
    batch_size: int = 32,
    precision: str = "fp32",
) -> Tuned:
    """Tune the threshold and calibration of a model on the examples of some files; nothing is written.

    Each file counts the same, and is scored with what was fitted on the others. `merge` replaces `decoding.merge`.
    `precision` is the number format that the model computes in, for the record.
    """
    examples = [example for part in questions.values() for example in part]
    check_tunable(examples, list(questions), method)
    if method == "features" and not model.gives_text:
        raise UsageError(
            "method features: expected a model that finds answers, got one that only decides whether there is one; use "
            "the method temperature."
        )
    if merge == "leads" and model.decoding.method == "independent":
        raise UsageError("merge leads: expected a model that chooses start and end together, got an independent one.")
    decoding = model.decoding if merge is None else model.decoding.model_copy(update={"merge": merge})
    return tune_decoding(
        decoding,
        examples,
        predict(model, examples, batch_size=batch_size, decoding=decoding),
        data=list(questions),
        files=[number for number, part in enumerate(questions.values()) for _ in part],
        method=method,
        force=force,
        gives_text=model.gives_text,
        language=language_of(examples),
        precision=precision,
    )


def tune_decoding(
    decoding: DecodingOptions,
    examples: Sequence[Example],
    predictions: Mapping[str, Prediction],
    *,
    data: Sequence[str],
    files: Sequence[int] | None = None,
    method: Method = "temperature",
    force: bool = False,
    gives_text: bool = True,
    language: str = "en",
    precision: str = "fp32",
) -> Tuned:
    """Tune the threshold for the best expected F1 on some examples, and fit the calibration to them.

    Each replaces what `decoding` has only if it is better when cross-fitted; with `force`, always. `files` are the
    numbers of the examples' files, if these are to count the same and to be the folds. The method features falls back
    to the method temperature.
    """
    check_tunable(examples, data, method)
    names = [Path(name).name for name in data]
    rounded: Any = None if precision == "fp32" else precision
    tuned_on = TunedOn(data=", ".join(names), questions=len(examples), sha256=fingerprint(examples), precision=rounded)
    sample = Sample.build(examples, predictions, tuned_on, files=files, gives_text=gives_text, language=language)
    report: dict[str, Any] = {"data": tuned_on.data, "questions": len(examples)}
    report |= {"precision": precision} if rounded else {}
    report |= {"answerable": int(sample.scores.answerable.sum()), "unanswerable": int(sample.unanswerable.sum())}
    if method == "features":
        different = len(set(names)) == len(names)
        changes, found = choose_features(sample, decoding, names if different else data, force)
        report |= found
        if changes is not None:
            return Tuned(decoding.model_copy(update=changes), report)
        method = "temperature"
    penalty, about_penalty = choose_window_penalty(sample, method, force)
    threshold, about_threshold = choose_threshold(sample, decoding, method, force, penalty)
    penalty = threshold["window_penalty"]  # of the threshold that is used
    calibration, about_calibration = choose_calibration(sample, decoding, method, force, penalty)
    report |= about_penalty | about_threshold | about_calibration
    keeps = "kept" in (report["threshold_choice"], report["calibration_choice"])
    own = decoding.calibration
    if keeps and own is not None and own.method == "features" and "ece_before" in report:
        # Its threshold is one of log-odds, which means something else without its calibration: keep both.
        reason = report["threshold_reason"] or report["calibration_reason"]
        for key in ("threshold", "calibration"):
            report |= {f"{key}_choice": "kept", f"{key}_reason": reason}
        return Tuned(decoding, {**report, "threshold": decoding.null_score_diff_threshold})
    return Tuned(decoding.model_copy(update={**threshold, **calibration}), report)


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
