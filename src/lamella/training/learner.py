"""A learner: what is trained, towards what, and by which steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lamella import registry
from lamella.config import LearnerOptions
from lamella.data.batches import Batch
from lamella.heads.tasks import Choice
from lamella.inference.model import ReaderModel


@dataclass
class Learner:
    """The trained parameters of a model with their loss, optimiser and schedule."""

    model: ReaderModel
    loss: Callable[[Sequence[Choice], Batch], dict[str, Tensor]]
    optimiser: Optimizer
    schedule: LambdaLR
    max_grad_norm: float


def make_learner(model: ReaderModel, options: LearnerOptions, total_steps: int) -> Learner:
    """Put together what the options describe."""
    head_rate = options.head_learning_rate or options.learning_rate
    groups = [
        *parameter_groups(model.encoder, options.learning_rate, options.weight_decay),
        *parameter_groups(model.head, head_rate, options.weight_decay),
    ]
    optimiser = AdamW(groups, lr=options.learning_rate, fused=model.device.type in ("cuda", "cpu"))
    schedule = registry.build("schedule", options.schedule, total_steps)
    return Learner(
        model=model,
        loss=registry.build("loss", options.loss),
        optimiser=optimiser,
        schedule=LambdaLR(optimiser, schedule),
        max_grad_norm=options.max_grad_norm,
    )


def parameter_groups(module: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in two groups: matrices are decayed; biases, LayerNorms and single factors are not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        ([parameter for parameter in trained if parameter.ndim >= 2], weight_decay),
        ([parameter for parameter in trained if parameter.ndim < 2], 0.0),
    ]
    return [{"params": found, "lr": learning_rate, "weight_decay": decay} for found, decay in groups if found]
