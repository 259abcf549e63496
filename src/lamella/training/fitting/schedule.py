"""Learning-rate schedules: the learning rate at every step, as a factor of its peak."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from lamella.registry import register
from lamella.section import Share

Schedule = Callable[[int], float]


@register("schedule", "constant")
def constant(total_steps: int, *, warmup: Share = 0.0) -> Schedule:
    """Constant after the warm-up."""
    return _after_warmup(total_steps, warmup, lambda share: 1.0)


@register("schedule", "linear")
def linear(total_steps: int, *, warmup: Share = 0.1) -> Schedule:
    """Linear decay to 0 after the warm-up."""
    return _after_warmup(total_steps, warmup, lambda share: 1.0 - share)


@register("schedule", "cosine")
def cosine(total_steps: int, *, warmup: Share = 0.1) -> Schedule:
    """Cosine decay to 0 after the warm-up."""
    return _after_warmup(total_steps, warmup, lambda share: 0.5 * (1 + math.cos(math.pi * share)))


@register("schedule", "cosine_with_restarts")
def cosine_with_restarts(total_steps: int, *, warmup: Share = 0.1, cycles: Annotated[int, Field(ge=1)] = 2) -> Schedule:
    """Several cosine decays to 0 after the warm-up, each from the peak."""
    return _after_warmup(
        total_steps,
        warmup,
        lambda share: 0.5 * (1 + math.cos(math.pi * ((cycles * share) % 1.0))) if share < 1 else 0.0,
    )


def _after_warmup(total_steps: int, warmup: float, decay: Callable[[float], float]) -> Schedule:
    """Rise linearly over the `warmup` share of the steps, then follow `decay` of the share of the rest."""
    rising = round(warmup * total_steps)

    def factor(step: int) -> float:
        if step < rising:
            return step / rising
        return decay(min(1.0, (step - rising) / max(1, total_steps - rising)))

    return factor
