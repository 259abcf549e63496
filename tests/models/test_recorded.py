"""Recorded passes equal plain ones; with a double of CUDA's graphs on a CPU, and with real ones on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from doubles import example, tiny_model
from lamella.data.windows.batches import Batch
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import Padded, pad
from lamella.inference.predict import iterate_batches, predict
from lamella.models import recorded
from lamella.models.model import ReaderModel
from lamella.models.recorded import (
    Inputs,
    RecordedPasses,
    encoder_inputs,
    enlarge_inputs,
    recorded_shape,
)

CPU = torch.device("cpu")
TEXT = "Christiaan Huygens discovered Titan in 1655 with a telescope that he had built himself."
QUESTIONS = [example(TEXT, "1655", question="Which " * (1 + 3 * (n % 5)), id=f"q{n}") for n in range(20)]
each_family = pytest.mark.parametrize("family", ["albert", "bert", "deberta-v2", "eurobert", "modernbert", "mpnet"])


class Graphs:
    """Captures by keeping the result of a body, and repeating it on the same tensors, as CUDA's graphs do."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captured += 1
        result = body()

        def replay() -> Tensor:
            result.copy_(body())
            return result

        return replay


def double(inputs: Inputs) -> Tensor:
    return inputs["x"].float() * 2


def windows(model: ReaderModel, number: int = 3) -> Padded:
    features = featurise(QUESTIONS[:number], model.tokenizer, model.windows)
    return pad(features, np.arange(len(features)))


def test_a_pass_is_recorded_the_second_time() -> None:
    graphs = Graphs()
    passes = RecordedPasses(CPU, graphs)
    results = [passes.begin(double, {"x": torch.full((2, 3), number)}) for number in range(4)]
    assert graphs.captured == len(passes) == 1
    assert [result.get()[0, 0] for result in results] == [0, 2, 4, 6], "later passes change no earlier result"
    passes.begin(double, {"x": torch.ones(3, 3)})
    passes.begin(double, {"x": torch.ones(3, 3)}, key="other")
    assert graphs.captured == 1, "each shape and key has a first time"


def test_graphs_are_dropped_with_the_tensors_they_read() -> None:
    passes = RecordedPasses(CPU, Graphs())
    for tensors in ("a", "a", "b"):
        assert passes.begin(double, {"x": torch.ones(1, 1)}, tensors=tensors).get()[0, 0] == 2
    assert len(passes) == 0


def test_the_least_recently_used_graphs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_GRAPHS", 2)
    graphs = Graphs()
    passes = RecordedPasses(CPU, graphs)
    for width in (1, 1, 2, 2, 1, 3, 3, 1, 1):
        passes.begin(double, {"x": torch.ones(1, width)})
    assert len(passes) == 2
    assert graphs.captured == 3, "that of width 1 stayed"


def test_what_cannot_be_recorded_runs_without_graphs() -> None:
    def refuse(body: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    passes = RecordedPasses(CPU, refuse)
    for _ in range(3):
        assert passes.begin(double, {"x": torch.ones(1, 1)}).get()[0, 0] == 2
    assert "not permitted" in str(passes.problem)


def test_a_cpu_records_nothing() -> None:
    passes = RecordedPasses(CPU)
    for _ in range(3):
        passes.begin(double, {"x": torch.ones(1, 1)})
    assert len(passes) == 0


def test_a_copy_records_its_own_passes() -> None:
    model = tiny_model(layers=1)
    graphs = Graphs()
    model._passes = RecordedPasses(CPU, graphs)
    for _ in range(2):
        model._passes.begin(double, {"x": torch.ones(1, 1)})
    copied = copy.deepcopy(model)
    assert copied._passes is not None
    assert (len(copied._passes), len(model._passes)) == (0, 1)


def test_shapes_are_few_and_within_the_positions() -> None:
    shapes = {recorded_shape(rows, width, 384) for rows in range(1, 129) for width in range(1, 385)}
    assert len(shapes) == 14 * 12
    assert recorded_shape(5, 100, 512) == (6, 128)
    assert recorded_shape(5, 100, 110) == (6, 110)
    assert recorded_shape(1000, 384, 384) == (1000, 384)


@each_family
def test_logits_of_enlarged_batches_are_the_same(family: str) -> None:
    model = tiny_model(family, layers=1)
    padded = windows(model, 5)
    width = padded.mask.shape[1]
    larger = enlarge_inputs(encoder_inputs(padded), model.positions, model.tokenizer.pad_token_id or 0)
    assert larger["mask"].shape == recorded_shape(5, width, model.positions)
    assert larger["mask"].shape > (5, width)
    assert larger["mask"][:, width:].sum() == 0
    assert torch.equal(larger["input_ids"][5], larger["input_ids"][0])
    with torch.inference_mode():
        logits = model(Batch.of_inputs(larger)).numpy()[:, :5, :width]
    right = np.where(padded.mask, model.logits(padded), 0)
    np.testing.assert_allclose(np.where(padded.mask, logits, 0), right, atol=1e-5)


@each_family
def test_a_replayed_pass_has_the_logits_of_a_plain_one(family: str) -> None:
    """The double of a graph repeats the pass on the tensors that were recorded, with other windows in them."""
    model, graphs = tiny_model(family, layers=1), Graphs()
    passes = RecordedPasses(CPU, graphs)
    features = featurise(QUESTIONS, model.tokenizer, model.windows)
    with torch.inference_mode():
        for first in range(0, len(QUESTIONS), 5):
            padded = pad(features, np.arange(first, first + 5))
            inputs = enlarge_inputs(encoder_inputs(padded), model.positions, model.tokenizer.pad_token_id or 0)
            pending = passes.begin(lambda own: model(Batch.of_inputs(own)), inputs)
            logits = pending.get()[:, :5, : padded.mask.shape[1]]
            expected = np.where(padded.mask, model.logits(padded), 0)
            np.testing.assert_allclose(np.where(padded.mask, logits, 0), expected, atol=1e-5)
    assert (graphs.captured, passes.problem) == (1, None)


def test_batches_begin_before_the_ones_before_are_read() -> None:
    model = tiny_model(layers=1)
    events = []

    class Watched:
        tokenizer, windows, decoding, gives_text = model.tokenizer, model.windows, model.decoding, True

        def begin_logits(self, padded: Padded) -> Callable[[], Any]:
            number = len([kind for kind, _ in events if kind == "begin"])
            events.append(("begin", number))

            def wait() -> Any:
                events.append(("wait", number))
                return model.logits(padded)

            return wait

    watched: Any = Watched()
    features = featurise(QUESTIONS, model.tokenizer, model.windows)
    assert sum(len(padded.windows) for padded, _ in iterate_batches(watched, features, 8)) == len(features)
    assert events[:4] == [("begin", 0), ("begin", 1), ("wait", 0), ("begin", 2)]
    assert predict(watched, QUESTIONS) == predict(model, QUESTIONS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_family
def test_a_gpu_replays_what_it_computed(family: str) -> None:
    model = tiny_model(family, layers=1)
    padded = windows(model, 5)
    right = np.where(padded.mask, model.logits(padded), 0)
    model.cuda()
    for _ in range(4):
        np.testing.assert_allclose(np.where(padded.mask, model.logits(padded), 0), right, atol=1e-4)
    assert model._passes is not None
    assert len(model._passes) == 1
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.mul_(2)  # in place: the graph reads the new values
    moved = np.where(padded.mask, model.logits(padded), 0)
    assert np.abs(moved - right).max() > 1e-3
    model.cpu()
    np.testing.assert_allclose(np.where(padded.mask, model.logits(padded), 0), moved, atol=1e-4)
