"""Score an ensemble, and its gain over each member."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lamella import runs
from lamella.data.examples import Example
from lamella.files import write_json
from lamella.inference.ensemble import EnsembleAnswers
from lamella.inference.prediction_files import write_predictions
from lamella.scoring.best_answers import null_odds_of
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of, score_all_answered, score_questions
from lamella.scoring.significance import paired_difference


def write_ensemble(
    folder: Path, ensemble: EnsembleAnswers, examples: Sequence[Example] | None, language: str | None = None
) -> dict[str, Any]:
    """Write the answers of an ensemble to an open run folder; with labelled `examples`, write its scores too."""
    write_predictions(folder, ensemble, ensemble.predictions, examples or ())
    options = {
        "members": list(ensemble.members),
        "how": ensemble.how,
        "level": ensemble.level,
        "decoding": ensemble.decoding.model_dump(),
    }
    write_json(folder / runs.CONFIG, {"ensemble": options})
    results: dict[str, Any] = {"how": ensemble.how, "level": ensemble.level, "total": len(ensemble.predictions)}
    if examples is not None:
        language = language or language_of(examples)
        results |= score_predictions(ensemble, examples, ensemble.predictions, language=language)
        results["gains"] = gains(ensemble, examples, language)
        write_json(folder / runs.RESULTS, results)
    return results


def gains(ensemble: EnsembleAnswers, examples: Sequence[Example], language: str) -> dict[str, Any]:
    """Return the gain over each member in F1 and exact match, in points, with 95 % intervals.

    Each side answers at its own threshold. `best_f1` compares both at their best thresholds, and has no interval. The
    gain of members that only decide whether there is an answer is in accuracy.
    """
    threshold = ensemble.decoding.null_score_diff_threshold
    if not ensemble.gives_text:
        return _decision_gains(ensemble, examples, threshold)
    texts = {id: prediction.text(threshold) for id, prediction in ensemble.predictions.items()}
    ensemble_scores = score_questions(examples, texts, language=language)
    ensemble_best = score_predictions(ensemble, examples, ensemble.predictions, language=language)["best_f1"]
    gains_by_member = {}
    for name, member in ensemble.members.items():
        member_scores = score_questions(examples, member.texts, language=language)
        member_best = score_predictions(ensemble, examples, member.predictions, language=language)["best_f1"]
        f1 = paired_difference(ensemble_scores.f1, member_scores.f1).in_percent()
        exact = paired_difference(ensemble_scores.exact, member_scores.exact).in_percent()
        gains_by_member[name] = {
            "f1": f1.value,
            "f1_interval": [f1.low, f1.high],
            "exact": exact.value,
            "exact_interval": [exact.low, exact.high],
            "best_f1": ensemble_best - member_best,
        }
    return gains_by_member


def _decision_gains(ensemble: EnsembleAnswers, examples: Sequence[Example], threshold: float) -> dict[str, Any]:
    answered = score_all_answered(examples)
    together = answered.withheld(null_odds_of(examples, ensemble.predictions) > threshold)
    gains_by_member = {}
    for name, member in ensemble.members.items():
        alone = answered.withheld(np.array([not member.texts[example.id] for example in examples]))
        gain = paired_difference(together.exact, alone.exact).in_percent()
        gains_by_member[name] = {
            "answerability_accuracy": gain.value,
            "answerability_accuracy_interval": [gain.low, gain.high],
        }
    return gains_by_member
