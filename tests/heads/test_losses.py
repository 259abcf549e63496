"""The loss against a numpy implementation, for every option."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamella import registry
from lamella.data.windows.batches import Batch
from lamella.errors import ConfigError
from lamella.heads.losses import CrossEntropy
from lamella.heads.tasks import Answerability, Choice, Span

LENGTHS = (6, 9, 4, 9, 7)  # real tokens; the first three are the question's, the rest context but for the last
T = 9


def make_batch(answers: tuple[bool, ...] = (True, False, False, True, False)) -> Batch:
    """Return windows of different lengths, with an answer in the third and fourth token, or without."""
    places, lengths = torch.arange(T), torch.tensor(LENGTHS[: len(answers)])
    mask = places < lengths[:, None]
    is_context = (places >= 2) & (places < lengths[:, None] - 1)
    start = torch.tensor([2 if answer else 0 for answer in answers])
    nothing = torch.zeros_like(mask)
    windows = np.arange(len(answers))
    return Batch(mask.long(), mask, nothing.long(), is_context, start, start + (start > 0), windows)


def make_choices(batch: Batch, task: str = "span", *, seed: int = 0) -> tuple[list[Choice], Tensor]:
    tokens = T if task == "span" else 1
    logits = 3 * torch.randn(2, len(batch.mask), tokens, generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    return (Span(4) if task == "span" else Answerability(4)).choices(logits, batch), logits


def numpy_error(scores: NDArray[np.float64], target: int, length: int, smoothing: float) -> float:
    """Cross-entropy of one window over its real candidates, with label smoothing."""
    powers = np.exp(scores[:length])
    log_p = np.log(powers / powers.sum())
    target_share = np.full(length, smoothing / length)
    target_share[target] += 1 - smoothing
    return float(-(target_share * log_p).sum())


def numpy_loss(choices: list[Choice], batch: Batch, **options: Any) -> float:
    weights = {"start": options.get("start", 1.0), "end": options.get("end", 1.0), "answerability": 1.0}
    errors, total = np.zeros(len(batch.mask)), 0.0
    for choice in choices:
        scores, lengths = choice.scores.detach().double().numpy(), choice.real.sum(1).tolist()
        window_errors = [
            numpy_error(row, int(target), length, options.get("label_smoothing", 0.0))
            for row, target, length in zip(scores, choice.target, lengths, strict=True)
        ]
        errors += weights[choice.name] * np.array(window_errors)
        total += weights[choice.name]
    errors /= total
    has = batch.start.numpy() > 0
    answerable, unanswerable = options.get("answerable", 1.0), options.get("unanswerable", 1.0)
    if options.get("weigh_by") == "group":
        groups = [(answerable, errors[has]), (unanswerable, errors[~has])]
        present = [(weight, group.mean()) for weight, group in groups if len(group)]
        return sum(weight * mean for weight, mean in present) / sum(weight for weight, _ in present)
    weight = np.where(has, answerable, unanswerable)
    return float((weight * errors).sum() / weight.sum())


OPTIONS = [
    {name: value for name, value in zip(names, values, strict=True) if value is not None}
    for names in [("start", "end", "answerable", "unanswerable", "weigh_by", "label_smoothing")]
    for values in itertools.product((None, 2.0), (None, 0.0), (None, 2.0), (None, 0.5), (None, "group"), (None, 0.1))
]


@pytest.mark.parametrize("task", ["span", "answerability"])
def test_every_combination_of_options(task: str) -> None:
    assert {option.name for option in registry.part("loss", "cross_entropy").options} == set().union(*OPTIONS)
    batch = make_batch()
    choices, _ = make_choices(batch, task)
    for options in OPTIONS:
        loss = registry.build("loss", {"name": "cross_entropy", **options})(choices, batch)["loss"]
        assert loss.item() == pytest.approx(numpy_loss(choices, batch, **options), rel=1e-5), options


def test_the_default_is_the_plain_mean() -> None:
    batch = make_batch()
    choices, logits = make_choices(batch)
    scores = logits.masked_fill(~batch.mask, -torch.inf)
    start = torch.nn.functional.cross_entropy(scores[0], batch.start)
    end = torch.nn.functional.cross_entropy(scores[1], batch.end)
    losses = CrossEntropy()(choices, batch)
    torch.testing.assert_close(losses["loss"], (start + end) / 2)
    torch.testing.assert_close(losses["start"], start)
    torch.testing.assert_close(losses["end"], end)
    assert not losses["start"].requires_grad


def parts(batch: Batch, choices: list[Choice]) -> dict[str, float]:
    losses = CrossEntropy()(choices, batch)
    return {name: value.item() for name, value in losses.items()}


def rows(choices: list[Choice], batch: Batch, which: Tensor) -> tuple[list[Choice], Batch]:
    some = [Choice(choice.name, choice.scores[which], choice.target[which], choice.real[which]) for choice in choices]
    tensors = {
        name: getattr(batch, name)[which] for name in ("input_ids", "mask", "token_types", "is_context", "start", "end")
    }
    return some, replace(batch, **tensors, windows=batch.windows[which.numpy()])


def test_the_korean_papers_start_weighted_loss() -> None:
    batch = make_batch()
    choices, _ = make_choices(batch)
    plain = parts(batch, choices)
    weighted = CrossEntropy(start=2)(choices, batch)["loss"].item()
    assert weighted == pytest.approx((2 * plain["start"] + plain["end"]) / 3, rel=1e-5)


@pytest.mark.parametrize("start", [1.0, 2.0])
def test_the_korean_papers_answer_weighted_loss(start: float) -> None:
    """(2A + U) / 3 with the means of the two groups, each (s + e) / 2 or, with both weights, (2s + e) / 3."""
    batch = make_batch()
    choices, _ = make_choices(batch)
    a, u = (
        parts(some, selected)
        for selected, some in (rows(choices, batch, w) for w in (batch.start > 0, batch.start == 0))
    )
    A, U = ((start * group["start"] + group["end"]) / (start + 1) for group in (a, u))
    weighted = CrossEntropy(answerable=2, weigh_by="group", start=start)(choices, batch)["loss"].item()
    assert weighted == pytest.approx((2 * A + U) / 3, rel=1e-5)
    # By example the same weights give something else: two windows against three.
    by_example = CrossEntropy(answerable=2, start=start)(choices, batch)["loss"].item()
    assert by_example == pytest.approx((2 * 2 * A + 3 * U) / (2 * 2 + 3), rel=1e-5)


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("weigh_by", ["example", "group"])
def test_a_batch_with_one_group_has_its_plain_loss(weigh_by: Any, answer: bool) -> None:
    batch = make_batch((answer,) * 4)
    choices, _ = make_choices(batch)
    weighted = CrossEntropy(answerable=2, unanswerable=0.5, weigh_by=weigh_by)(choices, batch)["loss"].item()
    assert weighted == pytest.approx(parts(batch, choices)["loss"], rel=1e-5)


@pytest.mark.parametrize("weigh_by", ["example", "group"])
@pytest.mark.parametrize("weight", ["answerable", "unanswerable"])
def test_windows_with_weight_zero_have_no_gradient(weight: str, weigh_by: Any) -> None:
    loss = CrossEntropy(**{weight: 0.0}, weigh_by=weigh_by)
    mixed = make_batch()
    choices, logits = make_choices(mixed)
    loss(choices, mixed)["loss"].backward()
    assert logits.grad is not None
    ignored = (mixed.start > 0) == (weight == "answerable")
    assert not logits.grad[:, ignored].any()
    assert logits.grad[:, ~ignored].any()

    alone = make_batch((weight == "answerable",) * 3)  # not a division by zero
    choices, logits = make_choices(alone)
    value = loss(choices, alone)["loss"]
    value.backward()
    assert value.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("options", OPTIONS[:: len(OPTIONS) // 16], ids=str)
def test_pads_do_not_change_the_loss(options: dict[str, Any]) -> None:
    batch = make_batch()
    loss = CrossEntropy(**options)
    logits = make_choices(batch)[1].detach()
    expected = loss(Span(4).choices(logits, batch), batch)["loss"]
    for garbage in (0.0, 1e4, -1e4, float("inf"), float("nan")):
        other = logits.masked_fill(~batch.mask, garbage).requires_grad_()
        value = loss(Span(4).choices(other, batch), batch)["loss"]
        assert torch.equal(value, expected)
        value.backward()
        assert other.grad is not None
        assert other.grad.isfinite().all()
        assert not other.grad[:, ~batch.mask].any()
    longer = torch.nn.functional.pad(logits, (0, 7), value=5.0)
    padded = {name: torch.nn.functional.pad(getattr(batch, name), (0, 7)) for name in ("mask", "is_context")}
    wider = replace(batch, **padded)
    torch.testing.assert_close(loss(Span(4).choices(longer, wider), wider)["loss"], expected)


def test_label_smoothing_is_over_real_tokens_only() -> None:
    """A window whose real tokens all score alike loses log(n), n its real tokens, whatever the label smoothing."""
    batch = make_batch()
    logits = torch.zeros(2, len(LENGTHS), T)
    for smoothing in (0.0, 0.1, 0.9):
        value = CrossEntropy(label_smoothing=smoothing)(Span(4).choices(logits, batch), batch)["loss"]
        assert value.item() == pytest.approx(np.log(LENGTHS).mean(), rel=1e-5)
    choices, single = rows(make_choices(batch)[0], batch, torch.tensor([1]))  # a window without pads
    expected = torch.nn.functional.cross_entropy(choices[0].scores, choices[0].target, label_smoothing=0.2)
    torch.testing.assert_close(CrossEntropy(end=0, label_smoothing=0.2)(choices, single)["loss"], expected)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_gradients_are_finite(scale: float) -> None:
    batch = make_batch()
    for options in OPTIONS:
        logits = (scale * torch.randn(2, len(LENGTHS), T)).requires_grad_()
        CrossEntropy(**options)(Span(4).choices(logits, batch), batch)["loss"].backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
        assert logits.grad.any()


def test_half_precision_is_computed_in_full() -> None:
    batch = make_batch()
    logits = make_choices(batch)[1].detach().bfloat16()
    value = CrossEntropy()(Span(4).choices(logits, batch), batch)["loss"]
    assert value.dtype == torch.float32
    assert torch.equal(value, CrossEntropy()(Span(4).choices(logits.float(), batch), batch)["loss"])


def test_the_labels_of_answerability() -> None:
    """0: the window contains the answer, 1: it does not; both classes are always candidates."""
    batch = make_batch()
    ((choice,), logits) = make_choices(batch, "answerability")
    assert choice.name == "answerability"
    assert choice.target.tolist() == [0, 1, 1, 0, 1]
    assert choice.real.all()
    assert choice.scores.shape == (len(LENGTHS), 2)
    assert torch.equal(choice.scores, logits[:, :, 0].T)
    sure = torch.tensor([[9.0, -9, -9, 9, -9], [-9.0, 9, 9, -9, 9]])[..., None]
    assert CrossEntropy()(Answerability(4).choices(sure, batch), batch)["loss"] < 1e-6


def test_the_labels_of_a_span() -> None:
    batch = make_batch()
    choices, logits = make_choices(batch)
    assert [choice.name for choice in choices] == ["start", "end"]
    for choice, target, scores in zip(choices, (batch.start, batch.end), logits, strict=True):
        assert torch.equal(choice.target, target)
        assert torch.equal(choice.scores, scores)
        assert torch.equal(choice.real, batch.mask)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"start": 0.0, "end": 0.0}, "start and end"),
        ({"answerable": 0.0, "unanswerable": 0.0}, "answerable and unanswerable"),
    ],
)
def test_weights_that_are_all_zero_are_refused(options: dict[str, float], names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CrossEntropy(**options)
    assert caught.value.problems == (f"{names}: expected a weight above 0 for at least one of them, got 0 for both.",)
