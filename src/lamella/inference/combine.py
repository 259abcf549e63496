"""Combine the probabilities of several readers, token by token or span by span."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lamella.data.windows.padding import Padded
from lamella.decoding_options import DecodingOptions
from lamella.errors import DataError
from lamella.inference.decode import log_sum_exp, mask_logits
from lamella.inference.prediction import NO_SPAN, Prediction, ScoredSpan, rank

Combination = Literal["max", "mean", "product", "vote"]
Place = tuple[int, int]
NULL: Place = (0, 0)  # place of "no answer"


def combine_logits(
    logits: Sequence[NDArray[Any]], padded: Padded, how: Combination, *, scaled: bool = True
) -> NDArray[np.float64]:
    """Return the log of the combined start and end probabilities [2, B, T]; -inf at tokens that cannot be chosen.

    With p_m the softmax of member m over context and [CLS]: `max` is max_m p_m, as in BERTVision (without dividing by
    the new sum), `mean` is Σ_m p_m / M, `product` is (Π_m p_m)^(1/M).

    `scaled` adds the mean over members of log Σ_t exp(logit_t), one number per window. This changes nothing within a
    window, but the windows of a long context then compare by logits, as for a single model, and not by probabilities
    within each window. So a model combined with itself gives exactly its own answers.
    """
    masked = [mask_logits(member, padded) for member in logits]
    totals = np.stack([log_sum_exp(member) for member in masked])  # [M, 2, B, 1]
    log_p = np.stack(masked) - totals  # [M, 2, B, T]
    if how == "max":
        combined = log_p.max(0)
    elif how == "mean":
        combined = np.logaddexp.reduce(log_p, axis=0) - math.log(len(masked))
    else:
        combined = log_p.mean(0)
    result: NDArray[np.float64] = combined + totals.mean(0) if scaled else combined
    return result


def combine_spans(
    predictions: Sequence[Prediction],
    how: Combination,
    *,
    texts: Sequence[str] = (),
    n_best: int = DecodingOptions().n_best_size,
    question: str = "",
) -> Prediction:
    """Combine the n-best lists of the members into one.

    A span missing from a member's list gets the lowest probability in that list. `vote` ranks by the number of members
    that chose a text (`texts`), then by mean probability: w = votes + mean / 2.

        member 1    Rome 0.6    none 0.3    in Rome 0.1
        member 2    none 0.8    Rome 0.2
        max         none 0.8    Rome 0.6    in Rome 0.2
        mean        none 0.55   Rome 0.4    in Rome 0.15
    """
    texts_at: dict[Place, str] = {NULL: ""}
    lists: list[dict[Place, float]] = []
    lowest: list[float] = []
    for prediction in predictions:
        scores = np.array([candidate.score for candidate in prediction.candidates])
        total = np.logaddexp.reduce(scores)  # not from the probabilities: far down the list they underflow to 0
        log_p = (scores - total).tolist()
        lists.append({})
        lowest.append(min(log_p) if prediction.best_span.text else float(NO_SPAN - total))
        for candidate, value in zip(prediction.candidates, log_p, strict=True):
            place = (candidate.begin_char, candidate.end_char) if candidate.text else NULL
            if texts_at.setdefault(place, candidate.text) != candidate.text:
                raise DataError(
                    f"question {question}: expected the same context for all members, got {texts_at[place]!r} and "
                    f"{candidate.text!r} at characters {place[0]}-{place[1]}; predict with all members on one file."
                )
            lists[-1][place] = value
    table = np.array(
        [[member.get(place, least) for member, least in zip(lists, lowest, strict=True)] for place in texts_at]
    )
    combined = _combine(table, how, [list(texts).count(text) for text in texts_at.values()])
    by_place = dict(zip(texts_at, combined.tolist(), strict=True))
    null = by_place.pop(NULL)
    spans: dict[str, ScoredSpan] = {}  # each text once, at its best place
    for place, value in sorted(by_place.items(), key=lambda item: (-item[1], item[0])):
        spans.setdefault(texts_at[place], (texts_at[place], *place, value, 0))
    return rank(list(spans.values())[:n_best], null)


def combine_decisions(null_odds: Sequence[float], how: Combination, *, abstained: int = 0) -> float:
    """Combine the null odds of members that only decide whether there is an answer into one.

    The probability of "no answer" of member m is 1 / (1 + exp(-odds_m)). `vote` counts the members that `abstained`.
    """
    odds = np.array(null_odds, np.float64)
    log_p = np.stack([-np.logaddexp(0, -odds), -np.logaddexp(0, odds)])  # [2, M]: no answer, answer
    none, some = _combine(log_p, how, [abstained, len(odds) - abstained]).tolist()
    return float(none - some)


def _combine(log_p: NDArray[np.float64], how: Combination, votes: Sequence[int]) -> NDArray[np.float64]:
    """Return one log-probability per place, from those of all members [places, M]."""
    if how == "max":
        return cast("NDArray[np.float64]", log_p.max(1))
    if how == "product":
        return cast("NDArray[np.float64]", log_p.mean(1))
    mean = np.logaddexp.reduce(log_p, axis=1) - math.log(log_p.shape[1])
    if how == "mean":
        return cast("NDArray[np.float64]", mean)
    cast_votes = np.array(votes, np.float64)
    with np.errstate(divide="ignore"):
        return cast("NDArray[np.float64]", np.logaddexp(np.log(cast_votes), mean - math.log(2)))
