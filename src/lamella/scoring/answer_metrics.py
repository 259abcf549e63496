"""Metrics of a single answer: the parts of the family `metric`, and their means over questions.

A metric compares one correct answer with one predicted answer, both as written; "" is no answer. `exact` and `f1`
define the scores that `lamella.scoring.metrics` computes for many answers at once. Other metrics are computed only if a
run file, a command or a call names them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lamella import registry
from lamella.data.examples import Example
from lamella.errors import UsageError, shorten
from lamella.languages import Language, get_language
from lamella.registry import register
from lamella.scoring.metrics import Missing, answer_groups, is_finite, overlap_f1, predicted_texts

AnswerMetric = Callable[[str, str, Language], float]
MetricSpec = str | Mapping[str, Any]  # a name, or a table with `name` and options

BUILT_IN = ("exact", "f1")  # in all results already


@register("metric", "exact")
def exact(gold: str, predicted: str, language: Language) -> float:
    """1 if the two texts are equal once normalised, otherwise 0."""
    return float(language.normalise(gold) == language.normalise(predicted))


@register("metric", "f1")
def f1(gold: str, predicted: str, language: Language) -> float:
    """Harmonic mean of precision and recall over shared words (English) or characters (Korean).

    Units count with repetition. The result is 1 if both texts normalise to nothing, 0 if only one does. (KorQuAD's
    script gives 0 to two such texts. It has no unanswerable questions, and its dev set no such answer.)
    """
    return overlap_f1(language.units(language.normalise(gold)), language.units(language.normalise(predicted)))


@register("metric", "word_f1")
def word_f1(gold: str, predicted: str, language: Language) -> float:
    """F1 over words separated by white space, in any language; printed beside F1 where that counts characters (Korean).

    A Korean particle is written at its word: "이순신이" instead of "이순신" is a wrong word, and 6 of 7 characters.
    """
    return overlap_f1(language.normalise(gold).split(), language.normalise(predicted).split())


@register("metric", "character_f1")
def character_f1(gold: str, predicted: str, language: Language) -> float:
    """F1 over characters without spaces, in any language; for Korean, the same as F1."""
    return overlap_f1(*(language.normalise(text).replace(" ", "") for text in (gold, predicted)))


def metrics_for(language: str, metrics: Mapping[str, AnswerMetric] | None) -> Mapping[str, AnswerMetric]:
    """Return the metrics to compute, with those that a language adds to exact match and F1."""
    added = build_metrics(getattr(get_language(language), "metrics", ()))
    return {**added, **(metrics or {})}


def build_metrics(specs: Sequence[MetricSpec]) -> dict[str, AnswerMetric]:
    """Return the metrics to compute in addition to the built-in ones, by name."""
    metrics: dict[str, AnswerMetric] = {}
    for spec in specs:
        name, options = registry.split(spec)
        part = registry.part("metric", name)
        if name not in BUILT_IN:
            metrics[name] = functools.partial(part.make, **part.resolved(options))
    return metrics


def score_metrics(
    metrics: Mapping[str, AnswerMetric],
    examples: Sequence[Example],
    predictions: Mapping[str, str],
    *,
    language: str = "en",
    missing: Missing = "error",
) -> dict[str, float]:
    """Return the mean of each metric in percent, as `NAME`, `HasAns_NAME` and `NoAns_NAME`.

    A question scores the best over its true answers. True answers that normalise to nothing do not count; a question
    without others expects "".
    """
    if not metrics:
        return {}
    rule, result = get_language(language), {}
    texts = predicted_texts([example.id for example in examples], predictions, missing)
    golds = [{answer.text for answer in example.answers if rule.normalise(answer.text)} or {""} for example in examples]
    groups = answer_groups(np.array([example.answerable for example in examples]))
    for name, metric in metrics.items():
        scores = []
        for example, answers, text in zip(examples, golds, texts, strict=True):
            values = [metric(gold, text, rule) for gold in answers]
            if wrong := [value for value in values if not is_finite(value)]:
                raise UsageError(
                    f"metric {name!r}: expected a finite number for question {example.id}, got {shorten(wrong[0])}; "
                    "repair the metric."
                )
            scores.append(max(values))
        for prefix, chosen in groups.items():
            result[f"{prefix}{name}"] = 100.0 * float(np.array(scores)[chosen].mean())
    return result


def add_scores(results: Mapping[str, Any], scores: Mapping[str, float]) -> dict[str, Any]:
    """Return results with the scores of metrics; a metric must not have the name of another result."""
    if taken := [name for name in scores if name in results or name in ("event", "step", "epoch")]:
        raise UsageError(
            f"metric {taken[0]!r}: expected a name that no other result has; register it under another name."
        )
    return {**results, **scores}
