"""Score a reader on texts of another kind: what it answers, what it refuses, and how well it knows its doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lamella.data.examples import Example
from lamella.decoding_options import DecodingOptions
from lamella.inference.abstention import PRIORS, at_prior, calibrated
from lamella.inference.no_answer import na_probability
from lamella.inference.prediction import Prediction
from lamella.models.facts import DomainScores
from lamella.scoring.best_answers import null_odds_of, score_best_answers
from lamella.scoring.calibrate import fingerprint
from lamella.scoring.risk_coverage import area, coverage_at, risk_coverage
from lamella.scoring.significance import bootstrap_differences
from lamella.scoring.threshold import expected_calibration_error, tune

COVERAGES = tuple(share / 10 for share in range(1, 11))
DIGITS = 2


def domain_scores(
    data: str,
    examples: Sequence[Example],
    predictions: Mapping[str, Prediction],
    decoding: DecodingOptions,
    *,
    language: str = "en",
    computed: str | None = None,
) -> DomainScores:
    """Score predictions at the threshold of a reader, at 0 and at the best; `data` names the questions.

    `computed` records how the answers were computed, such as "on a CPU in fp32".

    F1 is the official one: a text that normalises to nothing ("the") is right where there is no answer. In risk and
    coverage every answer to such a question is wrong, as in the official curves of precision and recall.
    """
    best = score_best_answers(examples, predictions, language=language)
    odds, threshold = null_odds_of(examples, predictions), decoding.null_score_diff_threshold
    answerable, kept = best.answerable, best.withheld(odds > threshold)
    contexts = {text: number for number, text in enumerate(dict.fromkeys(example.context.text for example in examples))}
    units = np.array([contexts[example.context.text] for example in examples])
    (interval,) = bootstrap_differences(100 * kept.f1[:, None], units)
    given = np.where(answerable, best.f1, 0.0)  # as if every question were answered
    coverage, risk = risk_coverage(-odds, given)
    places = [min(len(coverage), max(1, round(share * len(coverage)))) - 1 for share in COVERAGES]
    error = None
    if answerable.any() and not answerable.all():
        probability = na_probability(odds, decoding.calibration)
        error = _percent(expected_calibration_error(probability, ~answerable))
    return DomainScores(
        data=data,
        sha256=fingerprint(examples),
        questions=len(examples),
        unanswerable=int((~answerable).sum()),
        threshold=round(threshold, 4),
        merge=decoding.merge,
        f1=_percent(kept.f1.mean()),
        f1_low=round(interval.low, DIGITS),
        f1_high=round(interval.high, DIGITS),
        f1_at_0=_percent(best.withheld(odds > 0).f1.mean()),
        best_f1=_percent(best.withheld(odds > tune(best, odds)).f1.mean()),
        has_answer_f1=_percent(kept.f1[answerable].mean()) if answerable.any() else None,
        no_answer_f1=_percent(kept.f1[~answerable].mean()) if not answerable.all() else None,
        refused=_percent((odds[answerable] > threshold).mean()) if answerable.any() else None,
        refused_eager=_percent(_refused_eagerly(examples, predictions, decoding)) if answerable.any() else None,
        coverage_at_80=_percent(coverage_at(-odds, given, accuracy=0.8)),
        area_under_risk=_percent(area(-odds, given)),
        risk=[_percent(risk[place]) for place in places],
        calibration_error=error,
        computed=computed,
    )


def _refused_eagerly(
    examples: Sequence[Example], predictions: Mapping[str, Prediction], decoding: DecodingOptions
) -> float:
    """Return the share of the answerable questions without an answer if most questions are assumed to have one."""
    eager = at_prior(decoding, PRIORS["eager"])
    answerable = [example for example in examples if example.answerable]
    odds = null_odds_of(answerable, {e.id: calibrated(predictions[e.id], eager) for e in answerable})
    return float((odds > eager.null_score_diff_threshold).mean())


def _percent(share: float) -> float:
    return round(100 * float(share), DIGITS)
