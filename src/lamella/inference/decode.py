"""From start and end logits to the best spans of a window, and from windows to the answers of a question.

The score of a span is s_i + e_j with i <= j < i + max_answer_length, both in the context. That of "no answer" is
s_cls + e_cls; a question seen through several windows takes the smallest of them, as the official SQuAD 2.0 code does:
every window that misses the answer is right to say "not here".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamella.config import DecodingOptions
from lamella.data.batches import Batch, Indices
from lamella.data.features import Features
from lamella.errors import ModelError

NO_SPAN = -1e4  # the score of the best span where a context has no token to make one of


@dataclass(frozen=True)
class WindowSpans:
    """The best spans of some windows, best first; a score of -inf fills up where there are fewer."""

    windows: NDArray[np.int64]  # [B]
    start: NDArray[np.int64]  # [B, K]
    end: NDArray[np.int64]  # [B, K]
    score: NDArray[np.float64]  # [B, K]
    null: NDArray[np.float64]  # [B]


@dataclass(frozen=True)
class Candidate:
    """One span of the context, or "no answer" (an empty text at 0)."""

    text: str
    begin_char: int
    end_char: int
    score: float
    probability: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The words of the official n-best file, with our exact offsets."""
        return {
            "text": self.text,
            "probability": self.probability,
            "score": self.score,
            "start": self.begin_char,
            "end": self.end_char,
        }


@dataclass(frozen=True)
class Prediction:
    """What is known about one question: its n-best list, "no answer" among it, and how the two sides compare."""

    candidates: tuple[Candidate, ...]  # best first
    null_odds: float  # score of "no answer" minus that of the best span

    @property
    def best_span(self) -> Candidate:
        """The best candidate that is an answer."""
        return next((one for one in self.candidates if one.text), EMPTY)

    @property
    def na_prob(self) -> float:
        """The (uncalibrated) probability that there is no answer: the logistic function of the null odds."""
        return _logistic(self.null_odds)

    def text(self, threshold: float) -> str:
        """The answer, or the empty string where the null odds exceed the threshold."""
        return "" if self.null_odds > threshold else self.best_span.text


EMPTY = Candidate("", 0, 0, NO_SPAN)


def best_spans(logits: Tensor, batch: Batch, cls: int, options: DecodingOptions) -> WindowSpans:
    """The n best spans of every window, exactly: a top-k over the band i <= j < i + max_answer_length."""
    logits = logits.detach().float()
    start, end = logits.masked_fill(~batch.is_context, float("-inf"))  # [B, T] each
    if options.max_context_only:
        start = start.masked_fill(~batch.max_context, float("-inf"))
    length = min(options.max_answer_length, start.shape[1])
    padded = torch.nn.functional.pad(end, (0, length - 1), value=float("-inf"))
    band = start[:, :, None] + padded.unfold(1, length, 1)  # [B, T, D]: s_i + e_{i+d}
    score, flat = band.flatten(1).topk(min(options.n_best_size, band[0].numel()), dim=1)  # [B, K]
    first = flat // length
    found = WindowSpans(
        windows=batch.windows,
        start=first.cpu().numpy(),
        end=(first + flat % length).cpu().numpy(),
        score=score.cpu().double().numpy(),  # doubles only here: not every device has them
        null=logits[:, :, cls].cpu().double().sum(0).numpy(),
    )
    if not (np.isfinite(found.null).all() and (found.score < math.inf).all()):  # not a number is not below infinity
        raise ModelError(
            "the model's logits: expected finite numbers. Got infinite ones or nan; its training diverged (lower the "
            "learning rate), or its precision is too narrow (use fp32)."
        )
    return found


def merge_answerability(features: Features, odds: Iterable[tuple[Indices, Tensor]]) -> dict[str, Prediction]:
    """Predictions without a text, from each window's logits [2, B] of "here" and "not here".

    A question is answerable by its best window, so the smallest odds of "not here" are those of the question.
    """
    smallest: dict[int, float] = {}
    for windows, logits in odds:
        for window, value in zip(windows, (logits[1] - logits[0]).double().cpu().tolist(), strict=True):
            example = int(features.example[window])
            smallest[example] = min(smallest.get(example, math.inf), value)
    return {
        features.examples[index].id: Prediction((Candidate("", 0, 0, value, _logistic(value)),), null_odds=value)
        for index, value in sorted(smallest.items())
    }


def merge_windows(
    features: Features, windows: Iterable[WindowSpans], options: DecodingOptions
) -> dict[str, Prediction]:
    """The prediction of every question: its windows' spans together, one entry for a text, "no answer" among them."""
    spans: Mapping[int, dict[tuple[int, int], float]] = defaultdict(dict)
    nulls: dict[int, float] = {}
    for group in windows:
        for row, window in enumerate(group.windows):
            example = int(features.example[window])
            nulls[example] = min(nulls.get(example, math.inf), float(group.null[row]))
            of_example = spans[example]
            for start, end, score in zip(group.start[row], group.end[row], group.score[row], strict=True):
                if score == -math.inf:
                    break
                place = features.characters(int(window), int(start), int(end))
                if score > of_example.get(place, -math.inf):
                    of_example[place] = float(score)
    return {
        example.id: _rank(example.context.text, spans.get(index, {}), nulls[index], options.n_best_size)
        for index, example in enumerate(features.examples)
        if index in nulls
    }


def _rank(context: str, spans: Mapping[tuple[int, int], float], null: float, n_best: int) -> Prediction:
    by_text: dict[str, Candidate] = {}
    for (begin, end), score in sorted(spans.items(), key=lambda item: (-item[1], item[0])):
        text = context[begin:end]
        if text and text not in by_text:
            by_text[text] = Candidate(text, begin, end, score)
        if len(by_text) == n_best:
            break
    answers = list(by_text.values())
    best = answers[0].score if answers else NO_SPAN
    everything = sorted([*answers, Candidate("", 0, 0, null)], key=lambda one: -one.score)
    weights = np.exp(np.array([one.score for one in everything]) - everything[0].score)
    probabilities = weights / weights.sum()
    candidates = tuple(
        Candidate(one.text, one.begin_char, one.end_char, one.score, float(probability))
        for one, probability in zip(everything, probabilities, strict=True)
    )
    return Prediction(candidates, null_odds=null - best)


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-500.0, min(500.0, value))))
