"""Combine the probabilities of several readers, by token or by span."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions
from lamella.data.padding import Padded
from lamella.errors import DataError
from lamella.inference.decode import log_sum_exp, mask_logits
from lamella.inference.prediction import NO_SPAN, Prediction, ScoredSpan, rank

Combination = Literal["max", "mean", "product", "vote"]
Place = tuple[int, int]
NULL: Place = (0, 0)  # where "no answer" lies


def combine_logits(
    logits: Sequence[NDArray[Any]], padded: Padded, how: Combination, *, scaled: bool = True
) -> NDArray[np.float64]:
    """The logarithms [2, B, T] of the members' combined start and end probabilities; -inf at tokens of no choice.

    With p_m the softmax of member m over context and [CLS]: `max` is max_m p_m, which BERTVision does (nothing is
    divided by the new sum), `mean` is Σ_m p_m / M, `product` is (Π_m p_m)^(1/M).

    `scaled` adds the mean over members of log Σ_t exp(logit_t), one number for each window. It changes nothing within a
    window, but lets the windows of a long context compare as they do for a single model, by logits and not by shares
    of each window: so that a model combined with itself is still itself.
    """
    own = [mask_logits(one, padded) for one in logits]
    totals = np.stack([log_sum_exp(one) for one in own])  # [M, 2, B, 1]
    log_p = np.stack(own) - totals  # [M, 2, B, T]
    if how == "max":
        combined = log_p.max(0)
    elif how == "mean":
        combined = np.logaddexp.reduce(log_p, axis=0) - math.log(len(own))
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
    """One n-best list from the members' lists.

    A place that a member does not have counts as its lowest kept one. `vote` puts the number of members that settled on
    a text (`texts`) before everything else, and the mean probability behind it: w = votes + mean / 2.

        member 1    Rome 0.6    none 0.3    in Rome 0.1
        member 2    none 0.8    Rome 0.2
        max         none 0.8    Rome 0.6    in Rome 0.2
        mean        none 0.55   Rome 0.4    in Rome 0.15
    """
    words: dict[Place, str] = {NULL: ""}
    lists: list[dict[Place, float]] = []
    lowest: list[float] = []
    for prediction in predictions:
        scores = np.array([one.score for one in prediction.candidates])
        total = np.logaddexp.reduce(scores)  # not from the probabilities: one far down the list may have become 0
        log_p = (scores - total).tolist()
        lists.append({})
        lowest.append(min(log_p) if prediction.best_span.text else float(NO_SPAN - total))
        for one, value in zip(prediction.candidates, log_p, strict=True):
            place = (one.begin_char, one.end_char) if one.text else NULL
            if words.setdefault(place, one.text) != one.text:
                raise DataError(
                    f"question {question}: the members read different contexts; at {place[0]}-{place[1]} one has "
                    f"{words[place]!r} and another {one.text!r}."
                )
            lists[-1][place] = value
    table = np.array([[own.get(place, least) for own, least in zip(lists, lowest, strict=True)] for place in words])
    combined = _combine(table, how, [list(texts).count(text) for text in words.values()])
    by_place = dict(zip(words, combined.tolist(), strict=True))
    null = by_place.pop(NULL)
    answers: dict[str, ScoredSpan] = {}  # each text once, where it scores best
    for place, value in sorted(by_place.items(), key=lambda item: (-item[1], item[0])):
        answers.setdefault(words[place], (words[place], *place, value, 0))
    return rank(list(answers.values())[:n_best], null)


def _combine(log_p: NDArray[np.float64], how: Combination, votes: Sequence[int]) -> NDArray[np.float64]:
    """One logarithm for each place, from those of all members [places, M]."""
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
