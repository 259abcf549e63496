"""Recorded steps: the same as plain ones, whatever the shape; on a GPU, with its graphs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doubles import example, tiny_model
from lamella.config import LearnerOptions, TrainingOptions
from lamella.data.batches import Totals, collate
from lamella.data.features import Features, featurise
from lamella.encoder.tensors import trained_tensors
from lamella.models.model import ReaderModel
from lamella.training import cuda_graphs
from lamella.training.cuda_graphs import Recorded
from lamella.training.learner import Learner, Randomness, make_learner
from lamella.training.steps import BEGINNING, Steps

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "Christiaan Huygens discovered Titan in 1655 with a telescope that he had built himself."
OPTIONS = TrainingOptions(epochs=6, batch_size=4, accumulate=2)
LOSSES = [
    {"name": "cross_entropy"},
    {"name": "cross_entropy", "answerable": 2.0, "weigh_by": "group"},
    {"name": "cross_entropy", "label_smoothing": 0.1},
]


def some_features(model: ReaderModel) -> Features:
    """Windows of several widths, with and without the answer."""
    words = ["Titan", "1655", None, "telescope", "himself", None, "Huygens", "Christiaan", "built", None]
    examples = [
        example(TEXT, word, question="Which " * (1 + 3 * (n % 4)), id=f"q{n}") for n, word in enumerate(words * 2)
    ]
    return featurise(examples, model.tokenizer, model.windows)


def train(learner: Learner, features: Features, device: str = "cpu") -> list[dict[str, Any]]:
    learner.model.train()
    for step in Steps(lambda epoch: features, OPTIONS, [1.0]).after(BEGINNING):
        batches = [collate(step.features, windows, multiple_of=4) for windows in step.batches]
        totals = Totals.of(batches)
        for batch in batches:
            learner.learn(batch.to(torch.device(device)), None, totals)
        learner.step(step.epoch)
    return learner.records(lambda values: values)[0]


def learner_of(loss: dict[str, Any], tuning: str, *, device: str = "cpu") -> Learner:
    torch.manual_seed(1)
    model = tiny_model(encoder={"tuning": {"name": tuning}}, dropout=True).to(device)
    return make_learner(model, LearnerOptions(learning_rate=1e-3, loss=loss), 30)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
@pytest.mark.parametrize("tuning", ["full", "adapter"])
def test_recorded_steps_are_plain_steps(loss: dict[str, Any], tuning: str) -> None:
    plain, recorded = learner_of(loss, tuning), learner_of(loss, tuning)
    recordings = 0

    def record(body: Any) -> Any:  # a graph repeats what was recorded on the very tensors it was recorded on
        nonlocal recordings
        recordings += 1
        return body

    recorded.recorded = Recorded(recorded.backward, record)
    features = some_features(plain.model)
    assert train(plain, features) == train(recorded, features)
    assert recordings > 2, "several widths"
    there = trained_tensors(recorded.model)
    assert all(torch.equal(tensor, there[name]) for name, tensor in trained_tensors(plain.model).items())


def test_what_cannot_be_recorded_is_computed_plainly() -> None:
    plain, recorded = (learner_of(LOSSES[0], "full") for _ in range(2))

    def refuse(body: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    recorded.recorded = Recorded(recorded.backward, refuse)
    features = some_features(plain.model)
    assert train(plain, features) == train(recorded, features)
    assert recorded.recorded.problem is not None
    assert "not permitted" in recorded.recorded.problem


class FakeCuda:
    """What of torch.cuda a recording touches; at its end a spoilt one raises and tidies nothing up, as PyTorch does."""

    def __init__(self, patch: pytest.MonkeyPatch, *, spoilt: bool) -> None:
        self.calls: list[Any] = []
        self.outside, self.inside = SimpleNamespace(device_index=0), SimpleNamespace(device_index=1)
        self.stream, self.spoilt = self.outside, spoilt
        for name in ("clone_state", "graphsafe_set_state"):
            setattr(self, name, lambda *given, name=name: self.calls.append(name))
        patch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        patch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        patch.setattr(torch.cuda, "default_generators", (self,))
        patch.setattr(torch.cuda, "graph", self.graph)
        for name in ("endAllocateToPool", "releasePool"):
            patch.setattr(torch._C, f"_cuda_{name}", lambda *given, name=name: self.calls.append((name, *given)))

    @contextmanager
    def graph(self, graph: Any, pool: Any) -> Iterator[None]:
        self.stream = self.inside
        try:
            yield
        finally:
            if self.spoilt:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.stream = self.outside


@pytest.mark.parametrize("spoilt", [True, False])
def test_a_recording_that_fails_leaves_nothing_behind(spoilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is read back spoils the recording; an error of a part, or a full memory, does not."""
    cuda = FakeCuda(monkeypatch, spoilt=spoilt)
    plain, other = (learner_of(LOSSES[0], "full") for _ in range(2))
    backward, recorded_tensors = other.backward, []

    def reading_back(*arguments: Any) -> Any:
        if cuda.stream is cuda.inside:
            loss = torch.zeros(())
            recorded_tensors.append(weakref.ref(loss))
            raise RuntimeError("operation not permitted when stream is capturing")
        assert all(tensor() is None for tensor in recorded_tensors), "the error still holds them"
        return backward(*arguments)

    other.recorded = Recorded(reading_back)
    features = some_features(plain.model)
    assert train(plain, features) == train(other, features)
    assert len(recorded_tensors) == 1
    assert other.recorded.problem == "operation not permitted when stream is capturing"
    assert cuda.stream is cuda.outside
    ended = ["clone_state", "graphsafe_set_state", ("endAllocateToPool", 0, "pool"), ("releasePool", 0, "pool")]
    assert cuda.calls == (ended if spoilt else [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")
def test_a_gpu_goes_on_after_a_recording_that_was_spoilt() -> None:
    def run(*, recorded: bool) -> list[dict[str, Any]]:
        learner = learner_of(LOSSES[0], "full", device="cuda")
        backward = learner.backward

        def reading_back(*arguments: Any) -> Any:
            terms = backward(*arguments)
            assert terms["loss"].item() > 0
            return terms

        learner.recorded = Recorded(reading_back) if recorded else None
        records = train(learner, some_features(learner.model), "cuda")
        assert not recorded or "not permitted" in str(learner.recorded.problem)  # type: ignore[union-attr]
        return records

    plain, taken_back = run(recorded=False), run(recorded=True)
    assert [one["loss"] for one in taken_back] == pytest.approx([one["loss"] for one in plain], rel=2e-2)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    test_graphs_repeat_the_steps("bert", "full")  # another learner records its own


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
@pytest.mark.parametrize(
    ("records", "tuning", "precision", "options", "alone"),
    [
        (True, "full", "bf16", {}, True),
        (True, "adapter", "fp32", {}, True),
        (False, "full", "bf16", {}, False),  # several processes add up gradients into tensors of their own
        (False, "frozen", "bf16", {}, True),
        (False, "full", "fp16", {}, True),  # the loss is scaled, by another factor every time
        (False, "full", "bf16", {"distil": {"name": "sda"}}, True),  # its teachers change
    ],
)
def test_who_records_its_steps_on_a_gpu(
    records: bool, tuning: str, precision: str, options: dict[str, Any], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(encoder={"tuning": {"name": tuning}})
    model.precision, randomness = precision, Randomness(model.device)
    monkeypatch.setattr(ReaderModel, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(cuda_graphs, "_cuda_graphs", lambda: lambda body: body)
    learner = make_learner(model, LearnerOptions(**options), 30, randomness=randomness, alone=alone)
    assert (learner.recorded is not None) == records


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")
@pytest.mark.parametrize("tuning", ["full", "adapter"])
@pytest.mark.parametrize("family", ["bert", "mpnet", "albert", "distilbert", "electra", "roberta"])
def test_graphs_repeat_the_steps(family: str, tuning: str) -> None:
    def run(recorded: bool) -> list[dict[str, Any]]:
        torch.manual_seed(1)
        model = tiny_model(family, encoder={"tuning": {"name": tuning}}, dropout=True).cuda()
        model.precision = "bf16"
        learner = make_learner(model, LearnerOptions(learning_rate=1e-3), 30)
        assert learner.recorded is not None
        if not recorded:
            learner.recorded = None
        records = train(learner, some_features(model), "cuda")
        if learner.recorded is not None:
            assert learner.recorded.problem is None
            assert len(learner.recorded.recordings) > 2
        return records

    plain, graphs = run(False), run(True)
    assert [one["loss"] for one in graphs] == pytest.approx([one["loss"] for one in plain], rel=2e-2)
    assert graphs[-1]["loss"] < graphs[0]["loss"]
