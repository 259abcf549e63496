"""The contract of mixers, on every mixer with every task, and on every family of encoders.

The checks are those of `lamella.testing`; a part that is registered later is checked here without a new test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lamella import registry
from lamella.encoder.encoder import HiddenStates
from lamella.heads.head import LayerWeights, Stage, StageShape
from lamella.heads.pooling import Average
from lamella.testing import check_mixer
from lamella.testing.mixer_checks import MIXER_CHECKS, MixerCase
from lamella.testing.tiny import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")

# (part, check) -> why the part may fail the check
EXCEPTIONS: dict[tuple[str, str], str] = {}

SAVING = "survives_saving"
SMALLER: dict[str, dict[str, Any]] = {"xception": {"widths": [8, 8, 16, 16]}}  # the network of the paper is large


def cases(families_per_head: int) -> list[Any]:
    """Return every head on every family; all but some families per head are slow.

    The families differ only in the hidden states that a head reads. Neighbouring heads have different families, so that
    all families are covered.
    """
    heads = itertools.product(registry.names("mixer"), registry.names("task"))
    return [
        pytest.param(
            MixerCase(mixer, task, family, SMALLER.get(mixer, {})),
            id=f"{mixer}-{task}-{family}",
            marks=() if (place - number * families_per_head) % len(FAMILIES) < families_per_head else pytest.mark.slow,
        )
        for number, (mixer, task) in enumerate(heads)
        for place, family in enumerate(FAMILIES)
    ]


def check_unless_excepted(case: MixerCase, name: str) -> None:
    if not {(case.mixer, name), (case.task, name)} & set(EXCEPTIONS):
        MIXER_CHECKS[name](case)


@pytest.mark.parametrize("case", cases(families_per_head=3))
def test_every_mixer_keeps_the_contract(case: MixerCase) -> None:
    for name in MIXER_CHECKS:
        if name != SAVING:
            check_unless_excepted(case, name)


@pytest.mark.parametrize("case", cases(families_per_head=1))
def test_every_mixer_survives_saving(case: MixerCase) -> None:
    check_unless_excepted(case, SAVING)


def test_the_exceptions_name_parts_and_checks_that_exist() -> None:
    parts = {*registry.names("mixer"), *registry.names("task")}
    assert all(part in parts and check in MIXER_CHECKS for part, check in EXCEPTIONS)


@pytest.fixture
def mixer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Return a function that registers a mixer for one test and returns its name."""
    registry.names("mixer")
    family = registry.FAMILIES["mixer"]
    monkeypatch.setitem(registry.FAMILIES, "mixer", replace(family, parts=dict(family.parts)))

    def register(kind: Any) -> str:
        registry.register("mixer", "wrong")(kind)
        return "wrong"

    return register


def failure(name: str, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check_mixer(name, **options)
    return str(caught.value).splitlines()[0]


class Plain(Stage):
    """A stage that gives back what it reads."""

    def __init__(self, shape: StageShape) -> None:
        super().__init__()
        self.out_shape = shape

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        return x


class MixesPads(Plain):
    """The mean over the tokens, pads among them."""

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        return x + x.mean(3, keepdim=True)


class MixesWindows(Plain):
    """The mean over the windows of a batch."""

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        real = x.masked_fill(~hidden.mask[..., None], 0)
        return x + real.sum((2, 3), keepdim=True) / hidden.mask.sum()


class Constant(Plain):
    """It reads nothing."""

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Unused(Plain):
    """A parameter that nothing uses."""

    def __init__(self, shape: StageShape) -> None:
        super().__init__(shape)
        self.unused = nn.Parameter(torch.ones(1))


class InPlace(Plain):
    """It changes the layers that it is given."""

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        hidden.layers[0].add_(1.0)
        return x


class Random(Plain):
    """Noise in evaluation mode."""

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Forgets(Plain):
    """State that is not saved."""

    def __init__(self, shape: StageShape) -> None:
        super().__init__(shape)
        self.scale = 1.0

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        if self.training:
            self.scale = 2.0
        return x * self.scale


class WrongShape(Plain):
    """It drops tokens."""

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        return x[:, :, :, : x.shape[3] - 1] if x.shape[3] > 1 else torch.cat([x, x], 3)


class Infinite(Plain):
    """A logarithm of negative numbers."""

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        return x.log()


class OtherLayers(Plain):
    """It asks for a layer that was not offered."""

    @staticmethod
    def reads(layers: tuple[int, ...]) -> tuple[int, ...]:
        return (7,)


class UnstatedWeights(LayerWeights):
    """Weights per token, which it does not declare."""

    reads_q = True

    def __init__(self, shape: StageShape) -> None:
        super().__init__()
        self.out_shape = replace(shape, streams=shape.outputs, channels=1)

    def weigh(self, project: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
        return project(q).softmax(1)


class OtherWeights(Average):
    """Learned weights that are not those it applies."""

    @staticmethod
    def learned_layer_weights(tensors: Any, **options: Any) -> Tensor:
        return torch.ones(1, 3)


def not_a_class(shape: StageShape) -> Plain:
    """A function."""
    return Plain(shape)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (MixesPads, "pads change the logits (put pads to zero with hidden.mask before mixing tokens): by"),
        (MixesWindows, "a window alone has other logits than in a batch: by"),
        (Constant, "gave the same logits for other hidden states"),
        (Unused, "parameters without a gradient: stages.0.unused"),
        (InPlace, "gave different logits for the same input"),
        (Random, "gave different logits for the same input"),
        (Forgets, "gave other logits after saving and loading"),
        (WrongShape, "expected logits of shape"),
        (Infinite, "gave NaN or infinite logits from layers in torch.float32"),
        (OtherLayers, "reads((3,)) returned layers that were not offered: (7,)"),
        (UnstatedWeights, "layer weights differ per token; set weighs_per_token = True"),
        (OtherWeights, "learned_layer_weights differ from layer_weights: by"),
        (not_a_class, "expected a class derived from lamella.heads.head.Stage"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mixer_that_breaks_the_contract_is_refused_in_words(
    kind: Any, message: str, mixer: Callable[[Any], str]
) -> None:
    actual = failure(mixer(kind))
    assert message in actual
    assert actual.startswith("mixer 'wrong' with task "), actual


def test_a_mixer_that_cannot_be_built_is_refused_in_words() -> None:
    actual = failure("encoder_block", heads=5)
    assert actual.startswith(
        "mixer 'encoder_block' with task 'answerability' on albert: cannot be built: encoder_block.heads"
    )


def test_the_options_reach_the_mixer() -> None:
    check_mixer("compress", size=3)
    with pytest.raises(AssertionError, match=r"cannot be built: sise: no such option\. Did you mean 'size'"):
        check_mixer("compress", sise=3)
