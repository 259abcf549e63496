"""What an ensemble gains over each of its members."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.data.examples import Example
from lamella.files import write_json
from lamella.inference.ensemble import EnsembleAnswers
from lamella.inference.prediction_files import write_predictions
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of, score_questions
from lamella.scoring.significance import paired_difference


def write_ensemble(
    folder: Path, together: EnsembleAnswers, examples: Sequence[Example] | None, language: str | None = None
) -> dict[str, Any]:
    """Write an open run folder as every other stage reads it; with `examples` that have labels, scored."""
    write_predictions(folder, together, together.predictions, examples or ())
    options = {
        "members": list(together.members),
        "how": together.how,
        "level": together.level,
        "decoding": together.decoding.model_dump(),
    }
    write_json(folder / runs.CONFIG, {"ensemble": options})
    results: dict[str, Any] = {"how": together.how, "level": together.level, "total": len(together.predictions)}
    if examples is not None:
        language = language or language_of(examples)
        results |= score_predictions(together, examples, together.predictions, language=language)
        results["gains"] = gains(together, examples, language)
        write_json(folder / runs.RESULTS, results)
    return results


def gains(together: EnsembleAnswers, examples: Sequence[Example], language: str) -> dict[str, Any]:
    """What answering together adds to each member's F1 and exact match, in points, with 95 % intervals.

    A member answers at its own threshold; `best_f1` is at the best threshold of both, and has no interval.
    """
    texts = {id: one.text(together.decoding.null_score_diff_threshold) for id, one in together.predictions.items()}
    ours = score_questions(examples, texts, language=language)
    ours_best = score_predictions(together, examples, together.predictions, language=language)["best_f1"]
    found = {}
    for name, member in together.members.items():
        theirs = score_questions(examples, member.texts, language=language)
        theirs_best = score_predictions(together, examples, member.predictions, language=language)["best_f1"]
        f1 = paired_difference(ours.f1, theirs.f1).in_percent()
        exact = paired_difference(ours.exact, theirs.exact).in_percent()
        found[name] = {
            "f1": f1.value,
            "f1_interval": [f1.low, f1.high],
            "exact": exact.value,
            "exact_interval": [exact.low, exact.high],
            "best_f1": ours_best - theirs_best,
        }
    return found
