"""The contract of mixers, as checks that run on any registered mixer."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lamella import registry
from lamella.encoder.encoder import HiddenStates
from lamella.errors import ConfigError
from lamella.heads.head import Head, Stage
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.testing.tiny import DEPTH, FAMILIES, HIDDEN, saved_encoder, tiny_batch, tiny_encoder, tiny_run_config

TOLERANCE = 1e-5  # of logits in fp32


def check_mixer(name: str, /, **options: Any) -> None:
    """Check that a mixer keeps the contract of mixers, with every task on every tiny encoder.

    `MIXER_CHECKS` lists the checks; each function there states what it expects. A reader saves its head alike on all
    encoders, so that is checked on one.
    """
    for case in mixer_cases(name, options):
        for check in MIXER_CHECKS.values():
            if check is not check_survives_saving or case.family == "bert":
                check(case)


@dataclass(frozen=True)
class MixerCase:
    """A mixer with its options in a head for a task, on the hidden layers of an encoder family."""

    mixer: str
    task: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"mixer {self.mixer!r} with task {self.task!r} on {self.family}"

    @property
    def spec(self) -> dict[str, Any]:
        return {"name": self.mixer, **self.options}

    @functools.cached_property
    def head(self) -> Head:
        """A head in evaluation mode; no check changes it."""
        return self.new_head()

    @functools.cached_property
    def hidden(self) -> HiddenStates:
        """The layers that the head reads, with large values at the pads; no check changes them."""
        return self.new_hidden()

    @functools.cached_property
    def logits(self) -> Tensor:
        return self.compute(self.hidden)

    @property
    def real(self) -> Tensor:
        """The real tokens among the tokens that the head gives logits for, [B, T]."""
        return self.hidden.mask[:, :1] if self.head.at_cls else self.hidden.mask

    def new_head(self, *, noise: float = 0.0) -> Head:
        """Return a head in evaluation mode; `noise` is added to its initial parameters."""
        torch.manual_seed(0)
        try:
            head = Head(DEPTH, HIDDEN, mixer=[self.spec], task={"name": self.task}).eval()
        except ConfigError as error:
            raise AssertionError(f"{self}: cannot be built: {'; '.join(error.problems)}") from None
        with torch.no_grad():
            for parameter in head.parameters() if noise else ():
                parameter.add_(noise * torch.randn_like(parameter))
        return head

    def new_hidden(self) -> HiddenStates:
        layers = _all_layers(self.family)
        return replace(layers, layers=tuple(layers.layers[layer].clone() for layer in self.head.layers))

    def compute(self, hidden: HiddenStates) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.head(hidden)
        return logits


def mixer_cases(name: str, options: Mapping[str, Any] | None = None) -> list[MixerCase]:
    """Return the cases in which `check_mixer` checks a mixer: every task on every encoder family."""
    return [MixerCase(name, task, family, options or {}) for task in registry.names("task") for family in FAMILIES]


def check_is_a_stage(case: MixerCase) -> None:
    """Check that it is a class derived from Stage, with a docstring, and reads some of the layers it is offered."""
    kind = registry.part("mixer", case.mixer).make
    assert isinstance(kind, type), f"{case}: expected a class derived from lamella.heads.head.Stage"
    assert issubclass(kind, Stage), f"{case}: expected a class derived from lamella.heads.head.Stage"
    assert registry.part("mixer", case.mixer).summary, f"{case}: expected a docstring, whose first line is its summary"
    for layers in ((3,), (1, 2, 3), (0, 2)):
        read = kind.reads(layers)
        assert read, f"{case}: reads({layers}) returned no layer"
        assert set(read) <= set(layers), f"{case}: reads({layers}) returned layers that were not offered: {read}"
        assert len(set(read)) == len(read), f"{case}: reads({layers}) returned a layer twice: {read}"


def check_gives_finite_logits(case: MixerCase) -> None:
    """Check that it gives a finite logit in fp32 for every output and token, from layers in fp32 and in bf16."""
    outputs: int = cast(Any, registry.part("task", case.task).make).outputs
    for dtype in (torch.float32, torch.bfloat16):
        hidden = replace(case.hidden, layers=tuple(layer.to(dtype) for layer in case.hidden.layers))
        logits = case.logits if dtype == torch.float32 else case.compute(hidden)
        expected = (outputs, *case.real.shape)
        assert logits.shape == expected, f"{case}: expected logits of shape {expected}, got {tuple(logits.shape)}"
        assert logits.dtype == torch.float32, f"{case}: expected logits in float32 from {dtype}, got {logits.dtype}"
        assert logits[:, case.real].isfinite().all(), f"{case}: gave NaN or infinite logits from layers in {dtype}"
    assert all(0 <= layer <= DEPTH for layer in case.head.layers), f"{case}: asked for layers {case.head.layers}"
    assert len(set(case.head.layers)) == len(case.head.layers), f"{case}: asked for a layer twice: {case.head.layers}"


def check_is_deterministic(case: MixerCase) -> None:
    """Check that it gives the same logits twice in evaluation mode."""
    assert torch.equal(case.compute(case.hidden), case.logits), f"{case}: gave different logits for the same input"


def check_depends_on_its_input(case: MixerCase) -> None:
    """Check that it gives other logits for other hidden states."""
    head = case.new_head(noise=0.1)  # some mixers start with weights near zero
    rolled = replace(case.hidden, layers=tuple(layer.roll(1, 0) for layer in case.hidden.layers))
    with torch.no_grad():
        same = torch.allclose(head(case.hidden), head(rolled), atol=1e-6)
    assert not same, f"{case}: gave the same logits for other hidden states"


def check_ignores_pads(case: MixerCase) -> None:
    """Check that adding pads to a batch does not change the logits of its real tokens."""
    padded = case.compute(_with_pads(case.hidden))[..., : case.real.shape[1]]
    advice = "put pads to zero with hidden.mask before mixing tokens"
    _assert_close(padded[:, case.real], case.logits[:, case.real], f"{case}: pads change the logits ({advice})")


def check_treats_windows_alone(case: MixerCase) -> None:
    """Check that a window alone in a batch, with or without its pads, has the same logits as among others."""
    for row in range(len(case.hidden.mask)):
        length = int(case.real[row].sum())
        padded = case.compute(_slice(case.hidden, slice(row, row + 1), slice(None)))
        trimmed = case.compute(_slice(case.hidden, slice(row, row + 1), slice(0, int(case.hidden.mask[row].sum()))))
        what = f"{case}: a window alone has other logits than in a batch"
        _assert_close(padded[:, 0, :length], case.logits[:, row, :length], what)
        _assert_close(trimmed[:, 0], case.logits[:, row, :length], f"{what}, when it is not padded")


def check_trains_every_parameter(case: MixerCase) -> None:
    """Check that every parameter gets a finite gradient, and that the input does not change."""
    head, hidden = case.new_head().train(), case.new_hidden()
    before = [tensor.clone() for tensor in _tensors(hidden)]
    logits = head(hidden)
    # Not the loss: a bias that all tokens share has no gradient there, because the softmax over the tokens ignores it.
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights)[:, case.real].sum().backward()
    without = [name for name, value in head.named_parameters() if value.grad is None or not value.grad.any()]
    assert not without, f"{case}: parameters without a gradient: {', '.join(without)}"
    infinite = [name for name, value in head.named_parameters() if not cast(Tensor, value.grad).isfinite().all()]
    assert not infinite, f"{case}: parameters with a NaN or infinite gradient: {', '.join(infinite)}"
    same = all(torch.equal(old, new) for old, new in zip(before, _tensors(hidden), strict=True))
    assert same, f"{case}: changed its input in place"


def check_survives_saving(case: MixerCase) -> None:
    """Check that a reader gives exactly the same logits after saving and loading."""
    config = tiny_run_config(encoder={"tuning": "frozen"}, learner={"mixer": case.spec, "task": case.task})
    model = ReaderModel(load_encoder(str(saved_encoder(case.family))), config)
    batch = tiny_batch(case.family, characters=30)
    optimiser = torch.optim.AdamW(model.head.parameters(), lr=0.05)
    model.train()  # a step in training mode, so that running statistics move as well
    model(batch).square().mean().backward()
    optimiser.step()
    with torch.no_grad(), tempfile.TemporaryDirectory() as temporary:
        before = model.eval()(batch)
        model.save(Path(temporary) / "model")
        after = ReaderModel.load(Path(temporary) / "model")(batch)
    assert torch.equal(after, before), f"{case}: gave other logits after saving and loading; register buffers it needs"


def check_offers_its_layer_weights(case: MixerCase) -> None:
    """Check that layer weights have the shape [O, L, B, T], and that it applies the weights that it learned."""
    head = case.new_head(noise=0.1)  # many mixers start with equal weights
    stage = cast(Stage, head.stages[0])
    with torch.no_grad():
        weights = head.layer_weights(case.hidden)
        learned = stage.learned_layer_weights(stage.state_dict(), **registry.complete("mixer", case.spec))
    if weights is None:
        assert not stage.weighs_per_token, f"{case}: weighs_per_token is true, but layer_weights returned None"
        assert learned is None, f"{case}: learned_layer_weights returned weights, but layer_weights returned None"
        return
    outputs = len(case.logits)
    expected = (outputs, len(case.head.main_layers), *case.real.shape)
    assert weights.shape == expected, f"{case}: expected layer weights [O, L, B, T] = {expected}, got {weights.shape}"
    varies = not torch.allclose(weights[..., :1, :1].expand_as(weights)[:, :, case.real], weights[:, :, case.real])
    assert stage.weighs_per_token or not varies, f"{case}: layer weights differ per token; set weighs_per_token = True"
    if learned is not None:
        applied = learned[..., None, None].expand_as(weights)
        _assert_close(applied, weights, f"{case}: learned_layer_weights differ from layer_weights")


MIXER_CHECKS: dict[str, Callable[[MixerCase], None]] = {
    "is_a_stage": check_is_a_stage,
    "gives_finite_logits": check_gives_finite_logits,
    "is_deterministic": check_is_deterministic,
    "depends_on_its_input": check_depends_on_its_input,
    "ignores_pads": check_ignores_pads,
    "treats_windows_alone": check_treats_windows_alone,
    "trains_every_parameter": check_trains_every_parameter,
    "survives_saving": check_survives_saving,
    "offers_its_layer_weights": check_offers_its_layer_weights,
}


@functools.cache
def _all_layers(family: str) -> HiddenStates:
    """Return every layer of a tiny encoder over a padded batch, with large random values at the pads."""
    batch = tiny_batch(family, characters=30)
    with torch.no_grad():
        hidden: HiddenStates = tiny_encoder(family).encoder(batch, range(DEPTH + 1))
    pads = ~batch.mask[..., None]
    garbage = 50 * torch.randn(hidden.layers[0].shape, generator=torch.Generator().manual_seed(0))
    return replace(hidden, layers=tuple(torch.where(pads, garbage, layer) for layer in hidden.layers))


def _slice(hidden: HiddenStates, rows: slice, tokens: slice) -> HiddenStates:
    return HiddenStates(
        layers=tuple(layer[rows, tokens] for layer in hidden.layers),
        mask=hidden.mask[rows, tokens],
        is_context=hidden.is_context[rows, tokens],
    )


def _with_pads(hidden: HiddenStates, count: int = 8) -> HiddenStates:
    rows = len(hidden.mask)
    nothing = torch.zeros(rows, count, dtype=torch.bool)
    return HiddenStates(
        layers=tuple(torch.cat([layer, torch.full((rows, count, HIDDEN), 30.0)], 1) for layer in hidden.layers),
        mask=torch.cat([hidden.mask, nothing], 1),
        is_context=torch.cat([hidden.is_context, nothing], 1),
    )


def _tensors(hidden: HiddenStates) -> Iterator[Tensor]:
    yield from (*hidden.layers, hidden.mask, hidden.is_context)


def _assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    difference = float((actual - expected).abs().max()) if actual.numel() else 0.0
    assert difference <= TOLERANCE, f"{what}: by {difference:.2g}, expected at most {TOLERANCE:g}"
