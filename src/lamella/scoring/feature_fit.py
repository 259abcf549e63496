"""Fit the log-odds of "no answer" to features of n-best lists: logistic regression with an L2 penalty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamella.calibration import Calibration, FeatureWeight
from lamella.inference.abstention import WIDEST
from lamella.inference.no_answer import Floats, logistic

PENALTY = 1.0  # on the squared weights of standardised features; a question counts 1 on average


def fit_features(table: Floats, unanswerable: NDArray[np.bool_], weights: Floats, names: Sequence[str]) -> Calibration:
    """Fit one weight for each column of a table of features [N, F], and the bias, by Newton's method.

    The loss is convex, and the penalty keeps it strictly so: it has one minimum, and full steps reach it.
    """
    weights = weights * len(weights) / weights.sum()
    means = np.average(table, axis=0, weights=weights)
    scales = np.sqrt(np.average((table - means) ** 2, axis=0, weights=weights))
    scales = np.where(scales > 1e-9 * np.maximum(1, np.abs(means)), scales, 1.0)  # a constant feature keeps weight 0
    columns = np.column_stack([np.clip((table - means) / scales, -WIDEST, WIDEST), np.ones(len(table))])
    penalty = np.diag([PENALTY] * len(names) + [1e-6])  # the bias is free, but for data of one kind
    found = np.zeros(len(names) + 1)
    for _ in range(100):
        p = logistic(columns @ found)
        slope = columns.T @ (weights * (p - unanswerable)) + penalty @ found
        curvature = columns.T @ (columns * (weights * p * (1 - p))[:, None]) + penalty
        move = np.linalg.solve(curvature, slope)
        found = found - move
        if np.abs(move).max() < 1e-10:
            break
    features = [
        FeatureWeight.model_validate({"name": name, "mean": mean, "scale": scale, "weight": weight})
        for name, mean, scale, weight in zip(names, means.tolist(), scales.tolist(), found.tolist(), strict=False)
    ]
    return Calibration(method="features", features=features, bias=float(found[-1]))
