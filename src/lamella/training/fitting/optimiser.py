"""The optimiser of a learner: AdamW, with or without the correction of its bias."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer


def make_optimiser(
    groups: Iterable[dict[str, Any]], learning_rate: float, *, epsilon: float, bias_correction: bool, fused: bool
) -> Optimizer:
    """Build AdamW for groups of parameters."""
    if bias_correction:
        return AdamW(groups, lr=learning_rate, eps=epsilon, fused=fused)
    return UncorrectedAdamW(groups, {"lr": learning_rate, "eps": epsilon, "weight_decay": 0.0})


class UncorrectedAdamW(Optimizer):
    """AdamW as in the original BERT code: its moments start at 0, and the first steps are not corrected for that.

    m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²,   θ ← θ - lr · (m / (√v + ε) + weight decay · θ)

    The first steps are larger than with the correction, by (1 - β₁ᵗ) / √(1 - β₂ᵗ): 3.2 times at first, at most 6.6. The
    warm-up of the learning rate makes up for it.
    """

    BETAS = (0.9, 0.999)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            means, squares = self._moments(parameters)
            torch._foreach_lerp_(means, gradients, 1 - self.BETAS[0])
            torch._foreach_mul_(squares, self.BETAS[1])
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - self.BETAS[1])
            scales = torch._foreach_sqrt(squares)
            torch._foreach_add_(scales, group["eps"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_addcdiv_(parameters, means, scales, -group["lr"])

    def _moments(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in ("mean", "square")}
        states = [self.state[parameter] for parameter in parameters]
        return [state["mean"] for state in states], [state["square"] for state in states]
