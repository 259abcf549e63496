"""What an evaluation measures besides the answers: the dev loss, and the mean weights of the layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamella.config import POOLED
from lamella.data.windows.batches import Batch
from lamella.data.windows.features import Features
from lamella.data.windows.padding import Padded
from lamella.encoder.encoder import HiddenStates
from lamella.heads.head import Stage
from lamella.heads.losses import CrossEntropy
from lamella.inference.layer_means import LayerMeans
from lamella.models.model import ReaderModel

DIGITS = 6


class DevMeasures:
    """Measures one model while it answers the dev questions, from the logits and hidden layers of every batch.

    The dev loss is the plain cross-entropy for every learner, whatever it is trained with, so that learners can be
    compared: the mean over all dev windows. A window without the answer has the label "no answer", as in training.
    """

    def __init__(self, model: ReaderModel) -> None:
        self.head = model.head
        self.loss = CrossEntropy()
        self.loss_sum, self.windows = 0.0, 0
        stage: Any = model.head.stages[0]
        learns_weights = type(stage).learned_layer_weights is not Stage.learned_layer_weights
        self.layers = LayerMeans(model.head) if stage.weighs_per_token or learns_weights else None
        self.weighs_per_token = bool(stage.weighs_per_token)

    def add(self, features: Features, padded: Padded, hidden: HiddenStates, logits: NDArray[np.float32]) -> None:
        """Add a batch. The loss is computed on the CPU, where the logits are already."""
        batch = Batch.of(padded)
        mean = self.loss(self.head.task.choices(torch.from_numpy(logits), batch), batch)["loss"]
        self.loss_sum += float(mean) * len(padded.windows)
        self.windows += len(padded.windows)
        # Weights that are the same for all tokens are known after one batch.
        if self.layers is not None and (self.weighs_per_token or self.layers.sums is None):
            self.layers.add(features, padded, hidden)

    def join(self, gather: Callable[[list[Any]], list[Any]]) -> None:
        """Add the measures of all processes, so that each has the sums over all windows."""
        own = (self.loss_sum, self.windows, self.layers and (self.layers.sums, self.layers.counts))
        losses, windows, layers = zip(*gather([own]), strict=True)
        self.loss_sum, self.windows = sum(losses), sum(windows)
        if self.layers is not None:
            with_windows = [(sums, counts) for sums, counts in layers if sums is not None]
            self.layers.sums = sum(sums for sums, _ in with_windows) if with_windows else None
            self.layers.counts = sum(counts for _, counts in layers)

    @property
    def dev_loss(self) -> float | None:
        """The mean loss over all windows; None if it is not finite."""
        mean = self.loss_sum / max(1, self.windows)
        return round(mean, DIGITS) if math.isfinite(mean) else None

    def layer_weights(self) -> dict[str, Any] | None:
        """Return the mean weight of every layer, by output, and by kind of token where it differs between tokens.

        `layers` are numbered as the encoder counts them: 0 is the output of the embeddings. None if the head does not
        weigh layers.
        """
        if self.layers is None or self.layers.sums is None:
            return None
        by_kind = self.layers.by_kind() if self.weighs_per_token else {}
        return {
            "layers": ["pooled" if layer == POOLED else layer for layer in self.head.main_layers],
            "weights": {
                output: {kind: _rounded(weights) for kind, weights in {"all": means, **by_kind.get(output, {})}.items()}
                for output, means in self.layers.over_all_tokens().items()
            },
        }


def _rounded(weights: list[float]) -> list[float]:
    return [round(weight, DIGITS) for weight in weights]
