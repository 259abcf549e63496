"""Steps with CUDA graphs equal plain steps, for all shapes; on a GPU with real graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doubles import FAMILIES, example, save_tiny_encoder, tiny_model
from lamella.config import LearnerOptions, TrainingOptions
from lamella.data.windows.batches import Totals, collate
from lamella.data.windows.features import Features, featurise
from lamella.encoder.tensors import trained_tensors
from lamella.models.model import ReaderModel
from lamella.training.fitting import cuda_graphs
from lamella.training.fitting.cuda_graphs import GraphedBackward
from lamella.training.fitting.learner import Learner, RandomStream, make_learner
from lamella.training.fitting.steps import BEGINNING, Steps
from run_files import write_run_file

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "Christiaan Huygens discovered Titan in 1655 with a telescope that he had built himself."
OPTIONS = TrainingOptions(epochs=3, batch_size=4, accumulate=2)
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
            learner.add_gradients(batch.to(torch.device(device)), None, totals)
        learner.step(step.epoch)
    return learner.take_records(lambda values: values)[0]


def learner_of(loss: dict[str, Any], tuning: str, *, device: str = "cpu") -> Learner:
    torch.manual_seed(1)
    model = tiny_model(encoder={"tuning": {"name": tuning}}, layers=1).to(device)
    return make_learner(model, LearnerOptions(learning_rate=1e-3, loss=loss), 30)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
@pytest.mark.parametrize("tuning", ["full", "adapter"])
def test_graphed_steps_equal_plain_steps(loss: dict[str, Any], tuning: str) -> None:
    plain, graphed = learner_of(loss, tuning), learner_of(loss, tuning)
    captures = 0

    def capture(body: Any) -> Any:  # a graph repeats what was captured, on the same tensors
        nonlocal captures
        captures += 1
        return body

    graphed.graphed = GraphedBackward(graphed.backward, capture)
    features = some_features(plain.model)
    assert train(plain, features) == train(graphed, features)
    assert captures > 2, "several widths"
    tensors = trained_tensors(graphed.model)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in trained_tensors(plain.model).items())


def test_steps_that_cannot_be_captured_are_computed_without_a_graph() -> None:
    plain, graphed = (learner_of(LOSSES[0], "full") for _ in range(2))

    def refuse(body: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    graphed.graphed = GraphedBackward(graphed.backward, refuse)
    features = some_features(plain.model)
    assert train(plain, features) == train(graphed, features)
    assert graphed.graphed.problem is not None
    assert "not permitted" in graphed.graphed.problem


class FakeCuda:
    """The part of torch.cuda that a capture uses; a broken one raises at its end and cleans up nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, *, broken: bool) -> None:
        self.calls: list[Any] = []
        self.outside, self.inside = SimpleNamespace(device_index=0), SimpleNamespace(device_index=1)
        self.stream, self.broken = self.outside, broken
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

    def manual_seed(self, seed: int) -> None:
        """Where there is a GPU, `torch.manual_seed` seeds its generators too."""

    @contextmanager
    def graph(self, graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        self.stream = self.inside
        try:
            yield
        finally:
            if self.broken:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.stream = self.outside


@pytest.mark.parametrize("broken", [True, False])
def test_a_failed_capture_is_cleaned_up(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is read back breaks the capture; an error of a part, or a full memory, does not."""
    cuda = FakeCuda(monkeypatch, broken=broken)
    plain, graphed = (learner_of(LOSSES[0], "full") for _ in range(2))
    backward, captured_tensors = graphed.backward, []

    def reading_back(*arguments: Any) -> Any:
        if cuda.stream is cuda.inside:
            loss = torch.zeros(())
            captured_tensors.append(weakref.ref(loss))
            raise RuntimeError("operation not permitted when stream is capturing")
        assert all(tensor() is None for tensor in captured_tensors), "the error still holds them"
        return backward(*arguments)

    graphed.graphed = GraphedBackward(reading_back)
    features = some_features(plain.model)
    assert train(plain, features) == train(graphed, features)
    assert len(captured_tensors) == 1
    assert graphed.graphed.problem == "operation not permitted when stream is capturing"
    assert cuda.stream is cuda.outside
    ended = ["clone_state", "graphsafe_set_state", ("endAllocateToPool", 0, "pool"), ("releasePool", 0, "pool")]
    assert cuda.calls == (ended if broken else [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")
def test_a_gpu_continues_after_a_failed_capture() -> None:
    def run(*, graphed: bool) -> list[dict[str, Any]]:
        learner = learner_of(LOSSES[0], "full", device="cuda")
        backward = learner.backward

        def reading_back(*arguments: Any) -> Any:
            terms = backward(*arguments)
            assert terms["loss"].item() > 0
            return terms

        learner.graphed = GraphedBackward(reading_back) if graphed else None
        records = train(learner, some_features(learner.model), "cuda")
        assert not graphed or "not permitted" in str(learner.graphed.problem)  # type: ignore[union-attr]
        return records

    plain, graphs = run(graphed=False), run(graphed=True)
    assert [record["loss"] for record in graphs] == pytest.approx([record["loss"] for record in plain], rel=2e-2)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    test_real_graphs_equal_plain_steps("bert", "full")  # another learner captures its own


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
@pytest.mark.parametrize(
    ("captures", "tuning", "precision", "options", "single_process"),
    [
        (True, "full", "bf16", {}, True),
        (True, "adapter", "fp32", {}, True),
        (False, "full", "bf16", {}, False),  # several processes sum gradients into tensors of their own
        (False, "frozen", "bf16", {}, True),
        (False, "full", "fp16", {}, True),  # the loss is scaled, by another factor every time
        (False, "full", "bf16", {"distil": {"name": "sda"}}, True),  # its teachers change
    ],
)
def test_which_learners_capture_graphs_on_a_gpu(
    captures: bool,
    tuning: str,
    precision: str,
    options: dict[str, Any],
    single_process: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(encoder={"tuning": {"name": tuning}})
    model.precision, random_stream = precision, RandomStream(model.device)
    monkeypatch.setattr(ReaderModel, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(cuda_graphs, "make_capture", lambda: lambda body: body)
    learner = make_learner(
        model, LearnerOptions(**options), 30, random_stream=random_stream, single_process=single_process
    )
    assert (learner.graphed is not None) == captures


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")
@pytest.mark.parametrize("tuning", ["full", "adapter"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "xlm-roberta"])
def test_real_graphs_equal_plain_steps(family: str, tuning: str) -> None:
    def run(graphed: bool) -> list[dict[str, Any]]:
        torch.manual_seed(1)
        model = tiny_model(family, encoder={"tuning": {"name": tuning}}, dropout=True).cuda()
        model.precision = "bf16"
        learner = make_learner(model, LearnerOptions(learning_rate=1e-3), 30)
        assert learner.graphed is not None
        if not graphed:
            learner.graphed = None
        records = train(learner, some_features(model), "cuda")
        if learner.graphed is not None:
            assert learner.graphed.problem is None
            assert len(learner.graphed.graphs) > 2
        return records

    plain, graphs = run(False), run(True)
    assert [record["loss"] for record in graphs] == pytest.approx([record["loss"] for record in plain], rel=2e-2)
    assert graphs[-1]["loss"] < graphs[0]["loss"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")
def test_a_whole_run_captures_its_steps(tmp_path: Path, lamella: Callable[..., tuple[int, str, str]]) -> None:
    encoder = save_tiny_encoder(tmp_path / "tiny")
    file = write_run_file(tmp_path / "run.toml", f'name = "{encoder}"\ntuning = "full"', steps=12)
    code, printed, errors = lamella("train", file, "--out", tmp_path / "run", "--set", "training.precision=bf16")
    assert code == 0
    assert "could not be captured" not in printed + errors
