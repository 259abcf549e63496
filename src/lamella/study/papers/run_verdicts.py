"""Compare what each run has one number for: its accuracy in its worst epoch, and the mean layer that its head reads.

There is no value per question to test, so rows are compared seed by seed: a verdict needs all seeds to agree.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from lamella.study.papers.cost_verdicts import UntestedVerdict
from lamella.study.papers.matched_rows import MatchedRow
from lamella.study.papers.published_tables import LOWEST_ACCURACY, METRICS
from lamella.study.papers.verdicts import NOT_RUN, REVERSED, SAME, UNDECIDED
from lamella.study.result_files import Result

AVERAGE = [{"name": "average"}]  # the mixer that weighs all layers alike, and so records no weights


def compare_run_numbers(metric: str, first: MatchedRow, second: MatchedRow) -> UntestedVerdict:
    """Compare two rows that have runs; `first` is the row that should have the higher number."""
    by_seeds = first.results_by_seeds, second.results_by_seeds
    shared = [seeds for seeds in by_seeds[0] if seeds in by_seeds[1]]
    pairs = [(by_seeds[0][seeds], by_seeds[1][seeds]) for seeds in shared] or product(first.results, second.results)
    differences = []
    for one, other in pairs:
        numbers = _number(metric, one, other), _number(metric, other, one)
        if numbers[0] is None or numbers[1] is None:
            return UntestedVerdict(None, NOT_RUN, f"{METRICS[metric]} not recorded")
        differences.append(numbers[0] - numbers[1])
    mean = float(np.mean(differences))
    if min(differences) > 0:
        return UntestedVerdict(mean, SAME)
    if max(differences) < 0:
        return UntestedVerdict(mean, REVERSED)
    return UntestedVerdict(mean, UNDECIDED, "seeds disagree" if len(differences) > 1 else "")


def _number(metric: str, result: Result, compared: Result) -> float | None:
    return _lowest_accuracy(result) if metric == LOWEST_ACCURACY else _mean_layer(result, compared)


def _lowest_accuracy(result: Result) -> float | None:
    """Return the lowest accuracy of a classifier's curve; its accuracy, if it is a copy, which has no curve."""
    if result.content["command"] == "train":
        return min(filter(None, result.content.get("curve", {}).get("answerability_accuracy", ())), default=None)
    return None if result.at_0 is None else 100 * float(result.at_0[0].mean())


def _mean_layer(result: Result, compared: Result) -> float | None:
    """Return the mean number of the layers by their weights; average pooling is given the layers of the other row."""
    layers = result.content.get("layers")
    if layers:
        weights = np.mean([of_output["all"] for of_output in layers["weights"].values()], axis=0)
        return float(np.average(layers["layers"], weights=weights))
    if result.content["options"].get("learner.mixer") == AVERAGE and "layers" in compared.content:
        return float(np.mean(compared.content["layers"]["layers"]))
    return None
