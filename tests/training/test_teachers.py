"""Distillation compared with its definitions: the teachers, the distances, the cost."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from doubles import (
    DEPTH,
    example,
    save_tiny_encoder,
    tiny_config,
    tiny_encoder,
    tiny_model,
    tiny_run_config,
    tiny_tokenizer,
    write_short_questions,
)
from lamella.config import LearnerOptions, TrainingOptions
from lamella.data.file_formats.formats import read
from lamella.data.windows.batches import Batch, Totals, collate
from lamella.data.windows.features import Features, featurise
from lamella.encoder.pretrained import LoadedEncoder
from lamella.encoder.sources import DEFAULT_READER, READERS
from lamella.encoder.tensors import trained_tensors
from lamella.errors import LamellaError, RunError
from lamella.heads.losses import CrossEntropy
from lamella.heads.tasks import Answerability, Span
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.training.distillation.teachers import DistillationLoss, PastStudents
from lamella.training.fitting.bookkeeping import Bookkeeper
from lamella.training.fitting.learner import Learner, make_learner
from lamella.training.fitting.loop import fit
from lamella.training.fitting.objective import Forward, TaskLoss
from lamella.training.fitting.processes import Processes
from lamella.training.fitting.steps import BEGINNING, Steps
from lamella.training.run import train_plan

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "Christiaan Huygens discovered Titan in 1655 with a telescope that he had built himself."
RATE = 1e-2
SMALL_XCEPTION = {"name": "xception", "widths": [4, 4, 6, 6]}


def some_features(model: ReaderModel, count: int = 8) -> Features:
    """Windows of different lengths, every third without an answer."""
    words = TEXT.split()
    examples = [
        example(TEXT, None if n % 3 == 2 else words[n % 6], question="Which " * (n + 1), id=f"q{n}")
        for n in range(count)
    ]
    return featurise(examples, model.tokenizer, model.windows)


def some_batches(model: ReaderModel, steps: int, size: int = 3) -> list[Batch]:
    features = some_features(model)
    return [collate(features, (np.arange(size) + size * step) % len(features)) for step in range(steps)]


def options(distil: Any = None, **more: Any) -> LearnerOptions:
    """A constant rate, no weight decay, no clipping: the plain loops below need not repeat these."""
    constant = {"learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": 1e9, "schedule": {"name": "constant"}}
    return LearnerOptions.model_validate({**constant, "distil": distil, **more})


def train(learner: Learner, batches: Sequence[Batch]) -> list[dict[str, float]]:
    """Return the terms of every step; a frozen encoder runs outside the learner, as in the training loop."""
    learner.model.train()
    for batch in batches:
        frozen = not learner.model.encoder.trainable
        layers = sorted({*learner.model.head.layers, *learner.objective.layers})
        hidden = learner.model.encode(batch, layers) if frozen else None
        learner.add_gradients(batch, hidden, Totals.of([batch]))
        learner.step(0.0)
    return learner.take_records(lambda values: values)[0]


def without_noise(model: ReaderModel) -> ReaderModel:
    """Leave out what shifts a softmax as a whole: its gradient in a span's loss is rounding, which AdamW amplifies."""
    shifts = ("key.bias", "layer.1.output.LayerNorm.bias", "head.task.b")
    shifts = (*shifts, "blocks.0.layers.1.bias", "blocks.0.shortcut.bias")  # the last of the small Xception
    for name, parameter in model.named_parameters():
        if name.endswith(shifts):
            parameter.requires_grad_(False)
    return model


def span_loss(logits: Tensor, batch: Batch) -> Tensor:
    masked = logits.masked_fill(~batch.mask, -1e9)
    errors = (nn.functional.cross_entropy(masked[0], batch.start), nn.functional.cross_entropy(masked[1], batch.end))
    return sum(errors) / 2


def mean_squares(logits: Tensor, taught: Tensor, batch: Batch) -> Tensor:
    return (logits - taught).square()[:, batch.mask].mean()


def tensors_of(model: ReaderModel) -> list[Tensor]:
    return list(model.state_dict().values())


def train_by_hand(
    model: ReaderModel,
    batches: Sequence[Batch],
    kind: str,
    k: int,
    every: int = 1,
    begins: int = 0,
    weight: float = 1.0,
    include_current: bool = False,
) -> tuple[list[float], list[float]]:
    """Self-distillation as defined, in plain torch: whole copies of the model, and its own optimiser."""
    optimiser = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=RATE, weight_decay=0.0
    )
    taken: list[tuple[int, ReaderModel]] = []
    losses, terms = [], []
    for number, batch in enumerate(batches):
        logits = model.train()(batch)
        term = torch.zeros(())
        past = [student for after, student in taken if include_current or after < number][-k:]
        if len(past) == k and number >= begins:
            with torch.no_grad():
                if kind == "sda":
                    teacher = copy.deepcopy(past[-1])
                    for mean, *students in zip(tensors_of(teacher), *map(tensors_of, past), strict=True):
                        mean.copy_(sum(students) / k)
                    taught = teacher(batch)
                else:
                    taught = sum(student(batch) for student in past) / k
            term = mean_squares(logits, taught, batch)
        loss = span_loss(logits, batch) + weight * term
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (number + 1) % every == 0:
            taken = [*taken, (number + 1, copy.deepcopy(model).eval())][-k - 1 :]
        losses.append(loss.item())
        terms.append(term.item())
    return losses, terms


# --- the student's own past ---------------------------------------------------------------------------------------

TUNINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters": {"encoder": {"tuning": {"name": "adapter", "size": 4}}},
    "lora": {"encoder": {"tuning": {"name": "lora", "rank": 2}}},
    "frozen": {"encoder": {"tuning": "frozen"}, "learner": {"mixer": "scalar_mix"}},
    "batch norm": {"encoder": {"tuning": "frozen"}, "learner": {"mixer": SMALL_XCEPTION, "skip": True}},
}
VARIANTS = {
    "k=1": {"k": 1},
    "k=3": {"k": 3, "weight": 2.0},
    "every other step": {"k": 2, "every": 2},
    "late": {"k": 2, "warmup": 0.5},
    "current": {"k": 2, "include_current": True},
    "itself": {"k": 1, "include_current": True},
}


@pytest.mark.parametrize("kind", ["sda", "sdv"])
@pytest.mark.parametrize(
    ("tuning", "variant"),
    [
        *(("full", variant) for variant in VARIANTS),
        *(("frozen", variant) for variant in VARIANTS),
        ("adapters", "k=3"),
        ("lora", "k=3"),
        ("batch norm", "k=3"),
    ],
)
def test_self_distillation_follows_its_definition(kind: str, tuning: str, variant: str) -> None:
    model = without_noise(tiny_model(dropout=False, layers=2, **TUNINGS[tuning]))
    other = copy.deepcopy(model)
    wanted = VARIANTS[variant]
    batches = some_batches(model, steps=6)
    learner = make_learner(model, options({"name": kind, "dropout": False, **wanted}), len(batches))
    records = train(learner, batches)

    begins = round(wanted.get("warmup", 0) * len(batches))
    k, every, weight = int(wanted["k"]), int(wanted.get("every", 1)), wanted.get("weight", 1.0)
    current = bool(wanted.get("include_current"))
    losses, terms = train_by_hand(other, batches, kind, k, every, begins, weight, current)
    np.testing.assert_allclose([record["loss"] for record in records], losses, atol=1e-5)
    np.testing.assert_allclose([record["distillation"] for record in records], terms, atol=1e-5)
    silent = max(begins, k * every + (not current))
    assert all(record["distillation"] == 0 for record in records[:silent])
    if variant != "itself":  # that teacher is the student itself, and equals it without dropout
        assert all(record["distillation"] > 1e-5 for record in records[silent:])
    for (name, ours), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("tuning", ["full", "batch norm"])
def test_past_students_teach_with_dropout_unless_it_is_off(tuning: str) -> None:
    model = tiny_model(layers=2, **TUNINGS[tuning])
    batches = some_batches(model, steps=3)
    for off in ({"dropout": False}, {}):
        dropout = not off
        learner = make_learner(model, options({"name": "sda", "k": 2, **off}), len(batches))
        train(learner, batches)
        assert isinstance(learner.objective, PastStudents)
        (state,) = learner.objective.teacher_states
        before = {name: tensor.clone() for name, tensor in state.items()}
        forward = Forward(model.train(), batches[0], None)
        first, second = (learner.objective.teacher_logits(forward, forward()) for _ in range(2))
        assert first is not None
        assert second is not None
        if tuning == "full":  # the other model has no dropout, but statistics that training would change
            assert bool((first == second).all()) != dropout
        for name, tensor in before.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=0, msg=name)


def test_the_two_kinds_differ_if_a_model_is_not_linear() -> None:
    """Mean weights and mean logits are the same only for a linear head on a frozen encoder."""

    def terms(kind: str, **sections: Any) -> list[float]:
        model = tiny_model(dropout=False, **sections)
        learner = make_learner(model, options({"name": kind, "k": 3}), 8)
        return [record["distillation"] for record in train(learner, some_batches(model, 8))]

    assert terms("sda", encoder={"tuning": "frozen"}) == pytest.approx(terms("sdv", encoder={"tuning": "frozen"}))
    assert terms("sda")[4:] != pytest.approx(terms("sdv")[4:], rel=1e-3)


@pytest.mark.parametrize("kind", ["sda", "sdv"])
def test_a_teacher_without_dropout_is_in_evaluation_mode_and_leaves_the_student_as_it_was(kind: str) -> None:
    dropping = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    model = ReaderModel(tiny_encoder(**dropping), tiny_run_config())
    learner = make_learner(model, options({"name": kind, "k": 2, "dropout": False}), 4)
    batch = some_batches(model, 1)[0]
    copies = []
    for _ in range(3):  # the third is the student itself, which does not teach
        train(learner, [batch])
        copies.append(copy.deepcopy(model).eval())
    assert model.training
    with torch.no_grad():
        if kind == "sdv":
            expected = (copies[0](batch) + copies[1](batch)) / 2
        else:
            for first, second in zip(copies[0].parameters(), copies[1].parameters(), strict=True):
                first.lerp_(second, 0.5)
            expected = copies[0](batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    drawn = torch.get_rng_state()
    taught = learner.objective.teacher_logits(Forward(model, batch, None), torch.zeros(()))  # type: ignore[attr-defined]
    torch.testing.assert_close(taught, expected)
    assert taught.grad_fn is None
    assert not taught.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert torch.get_rng_state().equal(drawn)
    assert not torch.equal(model(batch), model(batch))  # the student itself has dropout


@pytest.mark.parametrize("kind", ["sda", "sdv"])
def test_no_gradient_reaches_the_ring(kind: str) -> None:
    model = tiny_model()
    learner = make_learner(model, options({"name": kind, "k": 2}), 4)
    train(learner, some_batches(model, 4))
    kept = [tensor for student in learner.objective.ring for tensor in student.values()]  # type: ignore[attr-defined]
    assert not any(tensor.requires_grad or tensor.grad is not None for tensor in kept)


@pytest.mark.parametrize("kind", ["sda", "sdv"])
def test_a_teacher_without_dropout_does_not_disturb_that_of_its_student(kind: str) -> None:
    """A teacher of weight 0 changes nothing; any other changes nothing before it begins."""

    def losses(distil: Any) -> list[float]:
        model = tiny_model()
        torch.manual_seed(3)
        return [record["loss"] for record in train(make_learner(model, options(distil), 6), some_batches(model, 6))]

    plain = losses(None)
    assert losses({"name": kind, "k": 2, "weight": 0.0, "dropout": False}) == plain
    taught = losses({"name": kind, "k": 2, "dropout": False})
    assert taught[:3] == plain[:3]
    assert all(mine != theirs for mine, theirs in zip(taught[3:], plain[3:], strict=True))


@pytest.mark.parametrize("tuning", TUNINGS)
def test_the_ring_holds_the_trained_tensors_of_the_last_students(tuning: str) -> None:
    model = tiny_model(**TUNINGS[tuning])
    model.head.register_buffer("seen", torch.tensor(0))  # a count, as in torch's own batch normalisation
    learner = make_learner(model, options({"name": "sda", "k": 3, "every": 2}), 11)
    objective: Any = learner.objective
    students = []
    for number, batch in enumerate(some_batches(model, 11), start=1):
        model.head.seen += 1
        train(learner, [batch])
        if number % 2 == 0:
            students.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        assert len(objective.ring) == min(3, (number - 1) // 2)
        assert len(objective.teacher_states) == (len(objective.ring) == 3)
    names = set(trained_tensors(model))
    assert "head.seen" in names
    assert any("encoder." in name for name in names) == (tuning in ("full", "adapters", "lora"))
    assert any("running_mean" in name for name in names) == (tuning == "batch norm")
    for kept, student in zip(objective.ring, students[-3:], strict=True):
        assert set(kept) == names
        assert all(value.equal(student[name]) for name, value in kept.items())
    (teacher,) = objective.teacher_states
    assert set(teacher) == names
    assert teacher["head.seen"].dtype == torch.int64
    assert teacher["head.seen"] == 10
    assert all(teacher[name].dtype == kept.dtype for name, kept in objective.ring[-1].items())


@pytest.mark.parametrize("kind", ["sda", "sdv"])
@pytest.mark.parametrize("done", [1, 4])
def test_a_checkpoint_continues_bit_for_bit(kind: str, done: int) -> None:
    def learner() -> Learner:
        model = tiny_model(learner={"mixer": SMALL_XCEPTION, "skip": True})
        torch.manual_seed(4)
        return make_learner(model, options({"name": kind, "k": 2}), 7)

    whole, first, second = learner(), learner(), learner()
    batches = some_batches(whole.model, 7)
    expected = train(whole, batches)
    records = train(first, batches[:done])
    file = io.BytesIO()
    torch.save({"learner": first.state(), "random": first.random_stream.state}, file)
    file.seek(0)
    content = torch.load(file, weights_only=True)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.add_(1.0)  # nothing may remain of the earlier values
    second.load_state(content["learner"])
    second.random_stream.state = content["random"]
    records += train(second, batches[done:])
    assert records == expected
    assert all(map(torch.equal, tensors_of(whole.model), tensors_of(second.model)))


def test_loss_scaling_and_a_skipped_step_do_not_break_the_teacher() -> None:
    """fp16 on a trained encoder: too large a scale gives infinite gradients, and the step is skipped."""
    model = tiny_model(layers=1)
    model.precision = "fp16"
    learner = make_learner(model, options({"name": "sdv", "k": 2}), 6)
    assert learner.scaler.is_enabled()
    learner.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    before = model.head.task.q.detach().clone()
    batches = some_batches(model, 16)
    train(learner, batches[:1])
    assert model.head.task.q.equal(before)
    records = train(learner, batches[1:])
    assert not model.head.task.q.equal(before)
    assert all(math.isfinite(record["distillation"]) for record in records)
    assert records[-1]["distillation"] > 0


@pytest.mark.parametrize(("kind", "tuning", "expected"), [("sda", "full", 1), ("sdv", "full", 4), ("sdv", "frozen", 0)])
def test_the_cost_of_past_students_is_known(kind: str, tuning: str, expected: int) -> None:
    model = tiny_model(**TUNINGS[tuning])
    learner = make_learner(model, options({"name": kind, "k": 4}), 8)
    assert learner.objective.extra_forwards == expected
    batches = some_batches(model, 6)
    train(learner, batches[:5])
    hidden = model.encode(batches[5], model.head.layers) if tuning == "frozen" else None
    calls = []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    learner.add_gradients(batches[5], hidden, Totals.of(batches[5:]))
    assert len(calls) == expected + (tuning != "frozen")


# --- the distance -------------------------------------------------------------------------------------------------


class Fixed(DistillationLoss):
    """A teacher with given logits."""

    taught: Tensor

    def teacher_logits(self, forward: Forward, own: Tensor) -> Tensor:
        return self.taught


def made_batch(lengths: Sequence[int], starts: Sequence[int], pads: int = 2) -> Batch:
    """Windows of these lengths: a [CLS], and context from the second token on."""
    T = max(lengths) + pads
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    nothing = torch.zeros(len(lengths), T, dtype=torch.long)
    labels = torch.tensor(starts)
    context = mask & (torch.arange(T) > 0)
    return Batch(nothing, mask, nothing, context, labels, labels, np.arange(len(lengths)))


def rows(batch: Batch, chosen: Any) -> Batch:
    names = ("input_ids", "mask", "token_types", "is_context", "start", "end", "windows")
    return replace(batch, **{name: getattr(batch, name)[chosen] for name in names})


def distance(task: Any, own: Tensor, taught: Tensor, batch: Batch, totals: Totals | None = None, **more: Any) -> Any:
    wanted = {"weight": 1.0, "measure": "mse", "over": "all", "warmup": 0.0, **more}
    objective = Fixed(TaskLoss(task, CrossEntropy()), 1, **wanted)
    objective.taught = taught
    return objective(lambda: own, batch, totals or Totals.of([batch]))  # type: ignore[arg-type]


def by_numpy(own: Tensor, taught: Tensor, real: Tensor, measure: str, outputs: Sequence[int]) -> float:
    mine, theirs, real = (tensor.detach().double().numpy() for tensor in (own, taught, real))
    found = []
    for output in outputs:
        for window in range(len(real)):
            z, y = (logits[output, window][real[window] > 0] for logits in (mine, theirs))
            if measure == "mse":
                found += ((z - y) ** 2).tolist()
            else:
                q, p = (np.exp(scores) / np.exp(scores).sum() for scores in (z, y))
                found.append(float((p * np.log(p / q)).sum()))
    return float(np.mean(found))


windows = st.lists(st.integers(2, 7), min_size=2, max_size=5)


@given(
    lengths=windows,
    seed=st.integers(0, 2**16),
    measure=st.sampled_from(["mse", "kl"]),
    over=st.sampled_from(["all", "start"]),
)
def test_the_distance_equals_numpy_and_ignores_padding(lengths: list[int], seed: int, measure: str, over: str) -> None:
    random = torch.Generator().manual_seed(seed)
    batch = made_batch(lengths, [number % 2 for number in range(len(lengths))])
    own, taught = torch.randn(2, 2, *batch.mask.shape, generator=random)
    expected = by_numpy(own, taught, batch.mask, measure, [0, 1] if over == "all" else [0])
    for garbage in (0.0, 1e30, float("inf"), float("-inf"), float("nan")):
        mine = own.masked_fill(~batch.mask, garbage).requires_grad_()
        theirs = taught.masked_fill(~batch.mask, -garbage)
        terms = distance(Span(4), mine, theirs, batch, measure=measure, over=over, weight=0.5)
        assert terms["distillation"].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        task = (terms["start"] + terms["end"]) / 2
        assert terms["loss"].item() == pytest.approx(task.item() + 0.5 * expected, rel=1e-4)
        (gradient,) = torch.autograd.grad(terms["loss"], mine)
        assert gradient.isfinite().all()
        assert not gradient[:, ~batch.mask].any()
        if over == "start":
            task_alone = distance(Span(4), mine, theirs, batch, over=over, weight=0.0)
            assert gradient[1].equal(torch.autograd.grad(task_alone["loss"], mine)[0][1])


@given(seed=st.integers(0, 2**16), measure=st.sampled_from(["mse", "kl"]), over=st.sampled_from(["all", "start"]))
def test_the_distance_of_answerability_is_over_its_two_classes(seed: int, measure: str, over: str) -> None:
    random = torch.Generator().manual_seed(seed)
    batch = made_batch([4, 2, 6], [0, 1, 3])
    own, taught = torch.randn(2, 2, 3, 1, generator=random)
    classes = [logits[:, :, 0].T[None] for logits in (own, taught)]  # [1, B, 2]
    expected = by_numpy(*classes, torch.ones(3, 2), measure, [0])
    terms = distance(Answerability(4), own, taught, batch, measure=measure, over=over)
    assert terms["distillation"].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@given(lengths=windows, cut=st.integers(1, 4), seed=st.integers(0, 2**16), measure=st.sampled_from(["mse", "kl"]))
@pytest.mark.parametrize("task", [Span, Answerability])
def test_the_terms_of_parts_add_up_to_the_whole(
    task: Any, lengths: list[int], cut: int, seed: int, measure: str
) -> None:
    random = torch.Generator().manual_seed(seed)
    batch = made_batch(lengths, [number % 2 for number in range(len(lengths))])
    places = batch.mask.shape[1] if task is Span else 1
    own, taught = torch.randn(2, 2, len(lengths), places, generator=random)
    own.requires_grad_()
    cut = min(cut, len(lengths) - 1)
    totals = Totals.of([batch])
    whole = distance(task(4), own, taught, batch, measure=measure)
    parts = [
        distance(task(4), own[:, chosen], taught[:, chosen], rows(batch, chosen), totals, measure=measure)
        for chosen in (slice(cut), slice(cut, None))
    ]
    for name, value in whole.items():
        assert sum(part[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-4, abs=1e-6)
    ours = torch.autograd.grad(parts[0]["loss"] + parts[1]["loss"], own)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(whole["loss"], own)[0])


# --- models that teach --------------------------------------------------------------------------------------------


class Records:
    """Collects the records of every learner."""

    def __init__(self) -> None:
        self.records: dict[str, list[dict[str, Any]]] = {}

    def write_history(self, learner: Learner, records: Sequence[dict[str, Any]]) -> None:
        self.records.setdefault(learner.name, []).extend(records)

    def evaluate(self, learners: Sequence[Learner], step: int, epoch: float) -> None: ...

    def save_models(self, learners: Sequence[Learner], epoch: float) -> None: ...

    def save_checkpoint(self, position: Any) -> None: ...


def one_pass(
    models: Sequence[ReaderModel], wanted: Sequence[LearnerOptions], features: Features, epochs: int = 2, batch: int = 4
) -> dict[str, list[dict[str, Any]]]:
    """Train learners on one frozen encoder with the real loop, in the real order."""
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test may have taken a GPU
    training = TrainingOptions(epochs=epochs, batch_size=batch)
    steps = Steps(lambda epoch: features, training, [1.0])
    learners = [
        make_learner(model, learner_options, steps.total, name=f"learner{number}", pass_models=models)
        for number, (model, learner_options) in enumerate(zip(models, wanted, strict=True))
    ]
    callbacks = Records()
    fit(learners, steps, training, Processes(Accelerator(cpu=True)), callbacks, encode=models[0].encode)
    return callbacks.records


def batches_of(features: Features, epochs: int = 2, batch: int = 4) -> list[Batch]:
    """The batches of `one_pass`."""
    steps = Steps(lambda epoch: features, TrainingOptions(epochs=epochs, batch_size=batch), [1.0])
    return [collate(features, step.batches[0]) for step in steps.after(BEGINNING)]


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder") / "tiny", pooler=True)


FROZEN = {"tuning": "frozen"}


def reader(base: LoadedEncoder, seed: int = 0, **sections: Any) -> ReaderModel:
    torch.manual_seed(seed)
    return ReaderModel(base, tiny_run_config(**sections))


def saved(model: ReaderModel, folder: Path) -> str:
    with torch.no_grad():
        model.head.task.q.mul_(20)  # as if it were trained
    model.save(folder)
    return str(folder)


def test_saved_models_teach_with_the_mean_of_their_logits(encoder_folder: Path, tmp_path: Path) -> None:
    """On the student's own frozen encoder they read its layers, also layers that the student's head does not read."""
    base = load_encoder(str(encoder_folder))
    student = reader(base, 5, encoder=FROZEN)
    teachers = [reader(base, seed, encoder=FROZEN, learner={"mixer": "average"}) for seed in (1, 2)]
    paths = [saved(model, tmp_path / f"teacher{number}") for number, model in enumerate(teachers)]
    features = some_features(student)
    expected = []
    plain = copy.deepcopy(student)
    optimiser = torch.optim.AdamW(plain.head.parameters(), lr=RATE, weight_decay=0.0)
    for batch in batches_of(features):
        with torch.no_grad():
            taught = (teachers[0].eval()(batch) + teachers[1].eval()(batch)) / 2
        logits = plain(batch)
        term = mean_squares(logits, taught, batch)
        optimiser.zero_grad()
        (span_loss(logits, batch) + 3 * term).backward()
        optimiser.step()
        expected.append(term.item())
    assert student.head.layers == (DEPTH,)

    records = one_pass([student], [options({"name": "teacher", "models": paths, "weight": 3.0})], features)["learner0"]
    np.testing.assert_allclose([record["distillation"] for record in records], expected, atol=1e-5)
    torch.testing.assert_close(student.head.task.q, plain.head.task.q, atol=1e-5, rtol=1e-5)
    assert records[-1]["distillation"] < records[0]["distillation"]


def teach(student: ReaderModel, *paths: str) -> Any:
    return make_learner(student, options({"name": "teacher", "models": list(paths)}), 10).objective


def calls_of(student: ReaderModel, objective: Any, hidden: Any = None) -> int:
    """Count how often the teachers run an encoder per batch."""
    calls: list[int] = []
    for encoder in {student.encoder, *(model.encoder for model in objective.models)}:
        encoder.register_forward_hook(lambda *_: calls.append(1))
    batch = some_batches(student, 1)[0]
    taught = objective.teacher_logits(Forward(student, batch, hidden), torch.zeros(()))
    with torch.no_grad():
        expected = sum(model(batch) for model in objective.models) / len(objective.models)
    torch.testing.assert_close(taught, expected)
    return len(calls) - len(objective.models)


def test_frozen_teachers_share_the_encoder_of_the_student(encoder_folder: Path, tmp_path: Path) -> None:
    base = load_encoder(str(encoder_folder))
    student = reader(base, encoder=FROZEN)
    paths = [
        saved(reader(base, seed, encoder=FROZEN, learner={"layers": layers, "mixer": "average"}), tmp_path / str(seed))
        for seed, layers in ((1, [1]), (2, [0, 2]))
    ]
    objective = teach(student, *paths)
    assert all(model.encoder is student.encoder for model in objective.models)
    assert objective.layers == (0, 1, 2)
    assert objective.extra_forwards == 0
    hidden = student.encode(some_batches(student, 1)[0], (0, 1, 2, DEPTH))
    assert calls_of(student, objective, hidden) == 0


def test_a_tuned_teacher_keeps_its_own_encoder(encoder_folder: Path, tmp_path: Path) -> None:
    tuned = reader(load_encoder(str(encoder_folder)))
    with torch.no_grad():
        tuned.encoder.model.embeddings.word_embeddings.weight.mul_(1.5)
    student = reader(load_encoder(str(encoder_folder)), encoder=FROZEN)
    objective = teach(student, saved(tuned, tmp_path / "tuned"))
    (teacher,) = objective.models
    assert teacher.encoder is not student.encoder
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert (objective.layers, objective.extra_forwards) == ((), 1)
    assert calls_of(student, objective) == 1
    batch = some_batches(student, 1)[0]
    with torch.no_grad():
        torch.testing.assert_close(teacher(batch), tuned.eval()(batch))


def test_teachers_that_share_another_encoder_run_it_once(encoder_folder: Path, tmp_path: Path) -> None:
    """An ensemble of heads on a large encoder teaches a small student, or one that trains its encoder."""
    base = load_encoder(str(encoder_folder))
    paths = [
        saved(reader(base, seed, encoder=FROZEN, learner={"layers": layers}), tmp_path / str(seed))
        for seed, layers in ((1, [1]), (2, [2]))
    ]
    small = save_tiny_encoder(tmp_path / "small", num_hidden_layers=1)
    for student in (reader(load_encoder(str(small)), encoder=FROZEN), reader(load_encoder(str(encoder_folder)))):
        objective = teach(student, *paths)
        assert objective.models[0].encoder is objective.models[1].encoder
        assert objective.models[0].encoder is not student.encoder
        assert (objective.layers, objective.extra_forwards) == ((), 1)
        assert calls_of(student, objective) == 1


def test_a_teacher_that_reads_the_pooled_output_has_the_pooler(encoder_folder: Path, tmp_path: Path) -> None:
    task = {"task": "answerability"}
    teacher = reader(
        load_encoder(str(encoder_folder), pooler=True), 1, encoder=FROZEN, learner={**task, "layers": "pooled"}
    )
    path = saved(teacher, tmp_path / "pooled")
    student = reader(load_encoder(str(encoder_folder)), encoder=FROZEN, learner=task)
    objective = teach(student, path)
    assert objective.layers == ()
    assert calls_of(student, objective) == 1
    student = reader(
        load_encoder(str(encoder_folder), pooler=True), 2, encoder=FROZEN, learner={**task, "layers": "pooled"}
    )
    assert teach(student, path).models[0].encoder is student.encoder


def test_a_bert_teaches_a_distilbert(encoder_folder: Path, tmp_path: Path) -> None:
    path = saved(reader(load_encoder(str(encoder_folder))), tmp_path / "bert")
    student = reader(load_encoder(str(save_tiny_encoder(tmp_path / "encoder", "distilbert"))))
    assert calls_of(student, teach(student, path)) == 1


def test_the_reader_of_the_package_teaches_by_its_name() -> None:
    student = reader(load_encoder("all-MiniLM-L6-v2"), encoder=FROZEN)
    objective = teach(student, DEFAULT_READER)
    assert objective.folders[0] == READERS / DEFAULT_READER
    assert calls_of(student, objective) == 1


def test_a_teacher_of_another_kind_is_refused_in_one_line(encoder_folder: Path, tmp_path: Path) -> None:
    transformers.BertForQuestionAnswering(tiny_config("bert")).save_pretrained(tmp_path)
    tiny_tokenizer("bert").save_pretrained(tmp_path)
    with pytest.raises(LamellaError, match=r"expected a model folder of Lamella, found another kind") as caught:
        teach(reader(load_encoder(str(encoder_folder))), str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def cased(folder: Path) -> Path:
    """An encoder with the same vocabulary whose tokenizer keeps capital letters."""
    save_tiny_encoder(folder)
    transformers.BertTokenizer(vocab=tiny_tokenizer("bert").get_vocab(), do_lower_case=False).save_pretrained(folder)
    return folder


MISFITS: dict[str, tuple[Callable[[Path, Path], ReaderModel], str]] = {
    "another vocabulary": (
        lambda tiny, fresh: reader(load_encoder(str(save_tiny_encoder(fresh, "mpnet")))),
        "teacher: expected a teacher with the student's tokenizer, got another one; the distiller stored takes any.",
    ),
    "another way to cut the same vocabulary": (
        lambda tiny, fresh: reader(load_encoder(str(cased(fresh)))),
        "teacher: expected a teacher with the student's tokenizer, got another one; the distiller stored takes any.",
    ),
    "another task": (
        lambda tiny, fresh: reader(load_encoder(str(tiny)), learner={"task": "answerability"}),
        "teacher: expected a teacher with the student's task, span, got answerability.",
    ),
    "shorter windows": (
        lambda tiny, fresh: reader(
            load_encoder(str(tiny)), windows={"max_seq_length": 64, "doc_stride": 16, "max_query_length": 24}
        ),
        "teacher: expected a teacher trained on windows of 128 tokens, got 64; lower windows.max_seq_length.",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_model_that_cannot_teach_is_refused_in_one_line(name: str, encoder_folder: Path, tmp_path: Path) -> None:
    make, expected = MISFITS[name]
    path = saved(make(encoder_folder, tmp_path / "encoder"), tmp_path / "teacher")
    with pytest.raises(LamellaError) as caught:
        teach(reader(load_encoder(str(encoder_folder))), path)
    headline, problem = str(caught.value).splitlines()
    assert headline == "learner.distil.models: 1 problem"
    assert problem.strip() == str(tmp_path / expected)


def test_all_problems_of_several_teachers_are_reported_at_once(encoder_folder: Path, tmp_path: Path) -> None:
    makes = [MISFITS[name][0] for name in ("another task", "shorter windows")]
    paths = [saved(make(encoder_folder, tmp_path), tmp_path / f"t{number}") for number, make in enumerate(makes)]
    with pytest.raises(LamellaError, match="2 problems"):
        teach(reader(load_encoder(str(encoder_folder))), *paths)


def test_a_missing_teacher_is_named(encoder_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LamellaError, match=r"nowhere': neither a model folder nor a run folder") as caught:
        teach(reader(load_encoder(str(encoder_folder))), str(tmp_path / "nowhere"))
    assert len(str(caught.value).splitlines()) == 1


# --- peers --------------------------------------------------------------------------------------------------------


def answerability_loss(logits: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :, 0].T, (~batch.has_answer).long())


@pytest.mark.parametrize("task", ["span", "answerability"])
@pytest.mark.parametrize("count", [2, 3])
def test_peers_teach_with_the_mean_of_their_logits_at_the_same_step(count: int, task: str) -> None:
    base = tiny_encoder()
    models = [reader(base, seed, encoder=FROZEN, learner={"task": task, "mixer": "average"}) for seed in range(count)]
    for model in models:
        with torch.no_grad():
            model.head.task.q.mul_(20)
    plain = copy.deepcopy(models)
    features = some_features(models[0])
    records = one_pass(models, [options({"name": "peers", "weight": 0.5})] * count, features)

    optimisers = [torch.optim.AdamW(model.head.parameters(), lr=RATE, weight_decay=0.0) for model in plain]
    for step, batch in enumerate(batches_of(features)):
        logits = [model(batch) for model in plain]
        for number, (mine, optimiser) in enumerate(zip(logits, optimisers, strict=True)):
            others = [other.detach() for place, other in enumerate(logits) if place != number]
            taught = sum(others[1:], others[0]) / len(others)
            if task == "span":
                term, loss = mean_squares(mine, taught, batch), span_loss(mine, batch)
            else:
                term, loss = (mine - taught)[:, :, 0].square().mean(), answerability_loss(mine, batch)
            record = records[f"learner{number}"][step]
            assert record["distillation"] == pytest.approx(term.item(), abs=1e-5)
            assert record["loss"] == pytest.approx((loss + 0.5 * term).item(), abs=1e-5)
            optimiser.zero_grad()
            (loss + 0.5 * term).backward()
        for optimiser in optimisers:
            optimiser.step()
    for ours, theirs in zip(models, plain, strict=True):
        torch.testing.assert_close(ours.head.task.q, theirs.head.task.q, atol=1e-5, rtol=1e-4)
        assert ours.training


def test_a_learner_without_peers_is_an_error_with_advice() -> None:
    base = tiny_encoder()
    span, other = (reader(base, encoder=FROZEN, learner={"task": task}) for task in ("span", "answerability"))
    for pass_models in ([], [span], [span, other]):
        with pytest.raises(LamellaError, match=r"peers: .*\[\[learner\]\].*frozen") as caught:
            make_learner(span, options("peers"), 10, pass_models=pass_models)
        assert len(str(caught.value).splitlines()) == 2


def test_a_peer_that_diverges_does_not_affect_the_others() -> None:
    base = tiny_encoder()
    models = [reader(base, seed, encoder=FROZEN) for seed in range(3)]
    wanted = [options("peers", learning_rate=1e38 if number == 1 else RATE) for number in range(3)]
    one_pass(models, wanted, some_features(models[0]), epochs=3)
    sound = [bool(model.head.task.q.isfinite().all()) for model in models]
    assert sound == [True, False, True]


# --- runs ---------------------------------------------------------------------------------------------------------

SMALL = [
    "data.train=demo:train",
    "data.dev=demo:dev",
    "windows.max_seq_length=128",
    "windows.doc_stride=32",
    "windows.max_query_length=24",
    "training.precision=fp32",
    "training.batch_size=16",
    "training.evaluate_every=100",
    "learner.learning_rate=0.01",
]


def train_run(lamella: Any, encoder: Path, out: Path, *more: str) -> str:
    config = out.parent / "run.toml"
    config.write_text("")
    settings = [word for setting in (*SMALL, f"encoder.name={encoder}", *more) for word in ("--set", setting)]
    code, output, err = lamella("train", config, "--out", out, *settings)
    assert (code, err) == (0, ""), err
    return str(output)


def history(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "step"]


def test_the_history_of_a_run_lists_every_term(lamella: Any, encoder_folder: Path, tmp_path: Path) -> None:
    few = ("data.max_train_samples=4", "data.max_eval_samples=2", "training.batch_size=4")
    distil = 'learner.distil={name = "sdv", k = 2, weight = 0.5}'
    output = train_run(lamella, encoder_folder, tmp_path / "sdv", *few, distil)
    assert "2 more times per batch" in output
    steps = history(tmp_path / "sdv")
    assert [step["distillation"] > 0 for step in steps] == [False] * 3 + [True] * (len(steps) - 3)
    assert len(steps) > 3
    for step in steps:
        task = (step["start"] + step["end"]) / 2
        assert step["loss"] == pytest.approx(task + 0.5 * step["distillation"], rel=1e-5)

    peers = ('learner.distil="peers"', 'encoder.tuning="frozen"', "grid.learner.seed=[0, 1]")
    output = train_run(lamella, encoder_folder, tmp_path / "peers", *few, *peers)
    assert "more times" not in output
    for seed in (0, 1):
        steps = history(tmp_path / "peers" / f"seed{seed}")
        assert all(step["distillation"] > 0 for step in steps)


class Killed(BaseException):
    """Simulates a kill."""


def test_a_run_does_not_resume_with_another_teacher(
    encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, teacher = load_encoder(str(encoder_folder)), tmp_path / "teacher"
    saved(reader(base, 1, encoder=FROZEN), teacher)
    table = {
        "data": {"train": "demo:train", "max_train_samples": 4},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(encoder_folder), "tuning": "frozen"},
        "learner": {"distil": {"name": "teacher", "models": [str(teacher)]}},
        "training": {"epochs": 2, "batch_size": 4, "precision": "fp32", "checkpoint_every": "2 steps"},
    }
    plan, save = make_plan(table, where="tests"), Bookkeeper.save_checkpoint

    def save_and_die(*arguments: Any) -> None:
        save(*arguments)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Bookkeeper, "save_checkpoint", save_and_die)
        with pytest.raises(Killed):
            train_plan(plan, tmp_path / "out")
    teacher.rename(tmp_path / "before")
    saved(reader(base, 2, encoder=FROZEN), teacher)
    with pytest.raises(RunError, match=rf"expected the teacher {re.escape(str(teacher))} that the run began with"):
        train_plan(plan, tmp_path / "out", resume=True)
    shutil.rmtree(teacher)
    (tmp_path / "before").rename(teacher)
    train_plan(plan, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "model").is_dir()


def test_an_ensemble_becomes_one_student(encoder_folder: Path, tmp_path: Path) -> None:
    """Taught by three readers with other seeds, a student is nearer to their mean than with only the labels."""
    base = load_encoder(str(encoder_folder))
    ensemble = [reader(base, seed, encoder=FROZEN, learner={"mixer": "scalar_mix"}) for seed in (1, 2, 3)]
    alone, output = (reader(base, 4, encoder=FROZEN, learner={"mixer": "scalar_mix"}) for _ in range(2))
    questions = read(write_short_questions(tmp_path / "short.jsonl")).examples
    train_set, dev_set = (featurise(part, base.tokenizer, alone.windows) for part in (questions[:24], questions[24:]))
    linear = {"schedule": {"name": "linear"}}
    one_pass(ensemble, [options(**linear)] * 3, train_set, epochs=10)
    members = []
    for number, model in enumerate(ensemble):
        model.eval().save(tmp_path / str(number))
        members.append(str(tmp_path / str(number)))
    distil = {"name": "teacher", "models": members, "weight": 10.0}
    one_pass([alone, output], [options(**linear), options(distil, **linear)], train_set, epochs=10)

    def apart(model: ReaderModel) -> float:
        """The mean squared distance to the mean logits of the ensemble."""
        batch = collate(dev_set, np.arange(len(dev_set)))
        with torch.no_grad():
            return mean_squares(model.eval()(batch), sum(member(batch) for member in ensemble) / 3, batch).item()

    assert apart(output) < 0.1 * apart(alone)
