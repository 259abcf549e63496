"""What training makes small, given the logits of a batch and its labels."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy as log_loss

from lamella.data.batches import Batch
from lamella.registry import register


@register("loss", "cross_entropy")
class CrossEntropy:
    """The mean of the start's and the end's cross-entropy over the real tokens: (CE(start) + CE(end)) / 2.

    Padding takes no part in the softmax, so a loss does not depend on what else is in the batch.
    """

    def __call__(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The loss under `loss`, and its terms beside it."""
        masked = logits.float().masked_fill(~batch.mask, float("-inf"))  # [O, B, T]
        start, end = log_loss(masked[0], batch.start), log_loss(masked[1], batch.end)
        return {"loss": (start + end) / 2, "start": start.detach(), "end": end.detach()}
