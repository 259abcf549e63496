"""Choose between a tuned threshold or calibration and what a model has: the tuned one must be better on other texts.

Each function returns the changes to the decoding options and the report. `*_choice` in the report is `tuned`, `kept`
(with the reason) or `forced` (tuned in spite of the reason).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lamella.decoding_options import DecodingOptions
from lamella.inference.no_answer import na_probability
from lamella.scoring.threshold import Method
from lamella.scoring.tuning_sample import Sample

SHORT = {"exact": "EM", "f1": "F1", "answerability_accuracy": "accuracy"}

Changes = dict[str, Any]
Report = dict[str, Any]


def choose_window_penalty(sample: Sample, method: Method, force: bool) -> tuple[float, Report]:
    """Choose the fitted penalty for long texts, or 0, by the F1 of thresholds tuned with each on other articles.

    Not on other files: if one of two files has the long texts, the other cannot show what length does.
    """
    penalty = sample.window_penalty()
    if not penalty:
        return 0.0, {}
    reason = sample.doubt
    report: Report = {"window_penalty_tuned": penalty}
    by_article = sample.by_article()
    if by_article.folds is not None:
        plain, penalised = (
            sample.percent("{}", by_article.cross_fit_threshold(method, penalise=penalise))["f1"]
            for penalise in (False, True)
        )
        report |= {"window_penalty_f1_without": plain, "window_penalty_f1_with": penalised}
        if reason is None and penalised <= plain:
            reason = f"its cross-fitted F1, {penalised:.2f}, is not better than {plain:.2f} without it"
    choice = _choice(reason, force)
    report |= {"window_penalty_choice": choice, "window_penalty_reason": reason}
    return 0.0 if choice == "kept" else penalty, report


def choose_threshold(
    sample: Sample, decoding: DecodingOptions, method: Method, force: bool, penalty: float = 0.0
) -> tuple[Changes, Report]:
    """Choose the tuned threshold, or the better of 0 and the one before; the tuned one comes with its penalty.

    Questions that cannot show what is better change nothing, unless forced.
    """
    metric = "f1" if sample.gives_text else "answerability_accuracy"
    report = _scores_before(sample, decoding)
    best, kept, origin, kept_penalty = report[f"{metric}_at_0"], 0.0, None, 0.0
    before = report.get(f"{metric}_before", -1.0)
    if before >= best or sample.doubt is not None:
        best, kept, origin = max(before, best), decoding.null_score_diff_threshold, decoding.tuned_on
        kept_penalty = decoding.window_penalty
    penalised = sample.penalised(penalty)
    tuned = penalised.threshold(method)
    report |= {"threshold_tuned": tuned, **sample.percent("{}_in_sample", penalised.null_odds > tuned)}
    reason = sample.doubt
    judged = sample.by_article() if penalty else sample  # other files cannot show what length does, as above
    if judged.folds is not None:
        report |= sample.percent("crossfit_{}", judged.cross_fit_threshold(method, penalise=penalty > 0))
        report["crossfit_by_article"] = penalty > 0
        crossfit = report[f"crossfit_{metric}"]
        if reason is None and crossfit <= best:
            reason = f"its cross-fitted {SHORT[metric]}, {crossfit:.2f}, is not better than {best:.2f}"
    choice = _choice(reason, force)
    value, tuned_on = (kept, origin) if choice == "kept" else (tuned, sample.tuned_on)
    penalty = kept_penalty if choice == "kept" else penalty
    report |= {"threshold": value, "threshold_choice": choice, "threshold_reason": reason, "window_penalty": penalty}
    return {"null_score_diff_threshold": value, "window_penalty": penalty, "tuned_on": tuned_on}, report


def choose_calibration(
    sample: Sample, decoding: DecodingOptions, method: Method, force: bool, penalty: float = 0.0
) -> tuple[Changes, Report]:
    """Choose the fitted calibration, or the better of none and the one before, for null odds with a penalty.

    Questions that cannot show what is better change nothing, unless forced.
    """
    refit = penalty > 0 and penalty != decoding.window_penalty
    penalised = sample.penalised(penalty)
    report = _errors_before(penalised, decoding)
    best, kept = report["ece_uncalibrated"], None
    if decoding.calibration is not None and report.get("ece_before", 101.0) <= best:
        best, kept = report["ece_before"], decoding.calibration
        kept = kept.model_copy(update={"fitted_on": kept.fitted_on or decoding.tuned_on})
    reason = sample.doubt
    if reason is not None:
        kept = decoding.calibration
    judged = sample.by_article() if refit else penalised
    if judged.folds is not None:
        found = judged.cross_fit(method, penalise=refit)
        errors = sample.calibration_errors(found.probability)
        report["crossfit_ece"] = sum(errors) / len(errors)
        if len(errors) > 1:
            report["crossfit_ece_worst"] = max(errors)
        if reason is None and report["crossfit_ece"] >= best:
            reason = f"the cross-fitted error, {report['crossfit_ece']:.2f} %, is not better than {best:.2f} %"
    choice = _choice(reason, force)
    report |= {"calibration_choice": choice, "calibration_reason": reason}
    if choice == "kept" and kept is None and decoding.calibration is not None:
        report["calibration_removed"] = True
    return {"calibration": kept if choice == "kept" else penalised.calibration(method)}, report


def choose_features(
    sample: Sample, decoding: DecodingOptions, names: Sequence[str], force: bool
) -> tuple[Changes | None, Report]:
    """Choose the calibration by features, or None: it must rank and calibrate better than the threshold alone.

    `names` are the files, each of which is scored by what was fitted on the others.
    """
    report: Report = {}
    reason = sample.doubt
    if sample.folds is not None:
        report["compared"] = _compare(sample, names)
        reason = reason or _why_not(report["compared"]["mean"], _scores_before(sample, decoding).get("f1_before"))
    choice = _choice(reason, force)
    report |= {"features_choice": choice, "features_reason": reason}
    if choice == "kept":
        return None, report
    fitted = sample.calibration("features")
    report |= _scores_before(sample, decoding) | _errors_before(sample, decoding)
    report |= sample.percent("{}_in_sample", sample.odds(fitted) > 0)
    if sample.folds is not None:
        found = sample.cross_fit("features")
        report |= sample.percent("crossfit_{}", found.withheld)
        report["crossfit_ece"] = sample.calibration_error(found.probability)
    report |= {"threshold": 0.0, "threshold_tuned": 0.0}
    for key in ("threshold", "calibration"):
        report |= {f"{key}_choice": choice, f"{key}_reason": reason}
    changes = {"null_score_diff_threshold": 0.0, "window_penalty": 0.0}
    return {**changes, "tuned_on": sample.tuned_on, "calibration": fitted}, report


def _compare(sample: Sample, names: Sequence[str]) -> Report:
    """Return the measures of both, for each file and as their mean."""
    found = {"threshold": sample.cross_fit("temperature"), "features": sample.cross_fit("features")}
    report: Report = {"mean": {kind: sample.measure(fitted) for kind, fitted in found.items()}}
    for number, name in enumerate(names) if len(names) > 1 else ():
        where = sample.files == number
        report[name] = {kind: sample.only(where).measure(fitted.only(where)) for kind, fitted in found.items()}
    return report


def _why_not(mean: Report, f1_before: float | None) -> str | None:
    """Return the reason to prefer the threshold alone, if there is one."""
    plain, features = mean["threshold"], mean["features"]
    for key, name in (("aurc", "area under the risk-coverage curve"), ("ece", "calibration error")):
        if features[key] >= plain[key]:
            return f"their {name}, {features[key]:.2f}, is not better than {plain[key]:.2f} with a threshold alone"
    best = max(plain["f1"], f1_before or 0.0)
    if features["f1"] < best:
        return f"their F1, {features['f1']:.2f}, is below the {best:.2f} with a threshold alone"
    return None


def _scores_before(sample: Sample, decoding: DecodingOptions) -> Report:
    """Return the scores at 0 and, unless it was tuned on these questions, at the threshold that the model has."""
    before = decoding.null_score_diff_threshold
    report: Report = sample.percent("{}_at_0", sample.null_odds > 0)
    by_features = decoding.calibration is not None and decoding.calibration.method == "features"
    if (before == 0 and not by_features and not decoding.window_penalty) or sample.was_used_for(decoding.tuned_on):
        return report
    withheld = sample.odds(decoding.calibration, decoding.window_penalty) > before
    return report | {"threshold_before": before, **sample.percent("{}_before", withheld)}


def _errors_before(sample: Sample, decoding: DecodingOptions) -> Report:
    """Return the calibration error without a calibration and, in the same way, with the one that the model has."""
    own = decoding.calibration
    report = {"ece_uncalibrated": sample.calibration_error(na_probability(sample.null_odds, None))}
    if own is not None and not sample.was_used_for(own.fitted_on or decoding.tuned_on):
        report["ece_before"] = sample.calibration_error(na_probability(sample.odds(own), own))
    return report


def _choice(reason_to_keep: str | None, force: bool) -> Literal["tuned", "forced", "kept"]:
    return "tuned" if reason_to_keep is None else "forced" if force else "kept"
