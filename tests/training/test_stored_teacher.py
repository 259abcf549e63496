"""Stored teachers: logits aligned with other tokens, compared with plain loops over characters."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from torch.fx.experimental.proxy_tensor import make_fx

from doubles import corpus, example, save_tiny_encoder, tiny_model, tiny_run_config, tiny_tokenizer
from lamella import runs
from lamella.config import LearnerOptions, WindowOptions
from lamella.data.examples import Context, Example
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write
from lamella.data.windows.batches import Batch, Totals, collate
from lamella.data.windows.features import Features, PairTemplate, featurise
from lamella.data.windows.padding import pad
from lamella.data.windows.spans import window_spans
from lamella.decoding_options import DecodingOptions
from lamella.errors import LamellaError, RunError
from lamella.inference.predict import predict
from lamella.inference.stored_logits import LogitsWriter, StoredLogits
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.training.distillation.logit_alignment import align
from lamella.training.fitting import bookkeeping
from lamella.training.fitting.learner import make_learner
from lamella.training.fitting.objective import Forward
from lamella.training.run import train_plan
from outcomes import timeless_history

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")
TEXT = "Christiaan Huygens discovered Titan in 1655 with a telescope that he had built himself."
WORDS = TEXT.split()


class NamedModel:
    """The part of a model that a writer of logits reads."""

    gives_text, decoding = True, DecodingOptions()


def keep(folder: Path, features: Features, logits: np.ndarray[Any, Any]) -> Path:
    """A run folder with these logits [2, tokens] for all windows."""
    writer = LogitsWriter(NamedModel())
    for window in range(len(features)):
        padded = pad(features, np.array([window]))
        row = np.zeros((2, *padded.mask.shape))
        row[:, padded.mask] = logits[:, features.rows[window] : features.rows[window + 1]]
        writer.add(features, padded, row)
    folder.mkdir(parents=True, exist_ok=True)
    writer.write(folder)
    return folder


def kept_by(model: ReaderModel, examples: Sequence[Example], folder: Path) -> str:
    """Write what `lamella predict --keep-logits` writes."""
    writer = LogitsWriter(model)
    with runs.new_run(folder, "predict"):
        predict(model, examples, sink=writer)
        writer.write(folder)
    return str(folder)


def options(**distil: Any) -> LearnerOptions:
    schedule = {"name": "constant"}
    return LearnerOptions.model_validate(
        {"learning_rate": 1e-3, "weight_decay": 0.0, "schedule": schedule, "distil": {"name": "stored", **distil}}
    )


def some_examples(count: int = 6) -> list[Example]:
    return [
        example(TEXT, None if n % 3 == 2 else WORDS[n], question="Which " * (n + 1), id=f"q{n}") for n in range(count)
    ]


def windows_of(model: ReaderModel, examples: Sequence[Example]) -> Features:
    return featurise(examples, model.tokenizer, model.windows)


def loud(model: ReaderModel) -> ReaderModel:
    with torch.no_grad():
        model.head.task.q.mul_(20)  # as if it were trained
    return model.eval()


# --- tokens matched by characters ---------------------------------------------------------------------------------


def align_by_loop(
    kept: Sequence[StoredLogits], train: Features, window: int, temperature: float | None
) -> tuple[np.ndarray[Any, Any], bool]:
    """Compute the aligned logits of a window, [O, T], token by token and character by character.

    They are probabilities at a temperature, or logits without one. Also return whether the window is taught.
    """
    found = []
    for teacher in kept:
        theirs = teacher.features
        ids = [example.id for example in theirs.examples]
        own = train.examples[train.example[window]]
        if own.id not in ids:
            continue
        mine = shown(train, window)
        best = max(
            np.flatnonzero(theirs.example == ids.index(own.id)).tolist(),
            key=lambda v: (len(set(mine) & set(shown(theirs, v))), -v),
        )
        found.append(align_one_by_loop(teacher, best, train, window, temperature))
    if not found:
        return np.zeros((2, train.lengths[window])), False
    if temperature is not None:
        return np.mean(found, axis=0), True
    with np.errstate(invalid="ignore"):
        stacked = np.array(found)
        known = stacked > -np.inf
        return np.where(known.any(0), np.where(known, stacked, 0).sum(0) / np.maximum(known.sum(0), 1), -np.inf), True


def shown(features: Features, window: int) -> range:
    """The characters that a window shows."""
    begin, end = int(features.context_begin[window]), int(features.context_end[window])
    return range(*features.characters(window, begin, end - 1)) if begin < end else range(0)


def align_one_by_loop(
    teacher: StoredLogits, best: int, train: Features, window: int, temperature: float | None
) -> np.ndarray[Any, Any]:
    theirs = teacher.features
    logits = teacher.logits(pad(theirs, np.array([best])))[:, 0].astype(np.float64)
    ids = [
        features.input_ids[features.rows[w] : features.rows[w + 1]] for features, w in ((theirs, best), (train, window))
    ]
    same = np.array_equal(*ids) and theirs.first_token[best] == train.first_token[window]
    begin, end = int(theirs.context_begin[best]), int(theirs.context_end[best])
    choices = list(range(len(ids[0]))) if same else [theirs.template.cls, *range(begin, end)]
    offsets, own = theirs.offsets[theirs.example[best]], train.offsets[train.example[window]]
    result = []
    for output in (0, 1):
        summed: dict[int, list[float]] = {}
        for choice in choices:
            to: int | None = choice
            if not same and choice == theirs.template.cls:
                to = train.template.cls
            elif not same:
                to = place(offsets[choice - begin + theirs.first_token[best]], own, output)
                to += int(train.context_begin[window]) - int(train.first_token[window])
                if not train.context_begin[window] <= to < train.context_end[window]:
                    to = None if temperature is None else train.template.cls
            if to is not None:
                summed.setdefault(to, []).append(logits[output, choice] / (temperature or 1.0))
        row = np.full(len(ids[1]), -np.inf)
        for to, scores in summed.items():
            row[to] = max(scores) + math.log(sum(math.exp(score - max(scores)) for score in scores))
        if temperature is not None:
            row = np.exp(row - row.max())
            row /= row.sum()
        result.append(row)
    return np.array(result)


def place(span: Any, own: Any, output: int) -> int:
    """The token that holds the first character of a span or the next one; or the last character, or the one before."""
    begin, end = map(int, span)
    at = begin if output == 0 else end - 1
    tokens = range(len(own)) if output == 0 else range(len(own) - 1, -1, -1)
    while 0 <= at < 1000:
        for number in tokens:
            if own[number][0] <= at < own[number][1]:
                return number
        at += 1 if output == 0 else -1
    return 10**6 if output == 0 else -(10**6)


def assert_equals_loop(folders: Sequence[Path], train: Features, temperature: float | None) -> None:
    aligned = align(folders, train, temperature=temperature)
    kept = [StoredLogits(folder) for folder in folders]
    for window in range(len(train)):
        found = aligned.padded(np.array([window]), int(train.lengths[window]) + 3)[:, 0]
        assert np.isneginf(found[:, -3:]).all()
        expected, taught = align_by_loop(kept, train, window, temperature)
        assert aligned.taught[window] == taught
        if not taught:
            assert np.isneginf(found).all()
        elif temperature is None:
            np.testing.assert_allclose(found[:, :-3], expected, atol=2e-2)  # of logits some 20 below the top
        else:
            np.testing.assert_allclose(np.exp(found[:, :-3]), expected, rtol=2e-2, atol=2e-3)


@st.composite
def cuts(draw: st.DrawFn, characters: int) -> np.ndarray[Any, Any]:
    """Tokens over a text, some characters in none."""
    ends = sorted(draw(st.sets(st.integers(1, characters), max_size=characters)))
    begins = [0, *ends][: len(ends)]
    spans = [(begin + (end - begin > 1 and draw(st.booleans())), end) for begin, end in zip(begins, ends, strict=True)]
    return np.array(spans, np.int32).reshape(-1, 2)


def made_features(
    texts: Sequence[str], spans: Sequence[Any], question: int, specials: tuple[int, int, int], room: int
) -> Features:
    """Windows over contexts with the given tokens; token ids are computed from their places."""
    prefix, middle, suffix = specials
    cls = prefix - 1
    heading = [*[5] * cls, 7, *[9] * question, *[2] * middle]
    columns: list[tuple[int, ...]] = []
    ids: list[int] = []
    rows = [0]
    for number, offsets in enumerate(spans):
        for first, last in window_spans(len(offsets), room, room // 2):
            head = len(heading)
            ids += [*heading, *(100 + 50 * int(b) + int(e) for b, e in offsets[first:last]), *[3] * suffix]
            rows.append(len(ids))
            columns.append((number, head, head + last - first, first, cls, cls))
    table = np.array(columns, np.int32).reshape(-1, 6).T
    return Features(
        examples=[Example(f"q{n}", "?", Context(text)) for n, text in enumerate(texts)],
        template=PairTemplate((*[5] * cls, 7), (2,) * middle, (3,) * suffix, cls, 0, 1),
        input_ids=np.array(ids, np.int32),
        rows=np.array(rows, np.int64),
        example=table[0],
        context_begin=table[1],
        context_end=table[2],
        first_token=table[3],
        start=table[4],
        end=table[5],
        max_context=np.zeros(len(ids), np.bool_),
        offsets=list(spans),
        max_seq_length=200,
        lost_answers=0,
    )


@given(data=st.data())
@settings(max_examples=60)
def test_tokens_are_matched_as_by_a_loop_over_characters(data: st.DataObject) -> None:
    """Any two tokenisations, any windows, one teacher or two of which the second does not know all texts."""
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=3))
    texts = ["x" * length + str(number) for number, length in enumerate(lengths)]
    special = st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(0, 1))

    def cut(count: int) -> Features:
        spans = [data.draw(cuts(length)) for length in lengths[:count]]
        return made_features(
            texts[:count], spans, data.draw(st.integers(0, 3)), data.draw(special), data.draw(st.integers(2, 12))
        )

    train = cut(len(texts))
    teachers = [cut(len(texts)), cut(1), train][: data.draw(st.integers(1, 3))]
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    with tempfile.TemporaryDirectory() as folder:
        folders = [
            keep(Path(folder) / str(number), teacher, random.normal(0, 3, (2, len(teacher.input_ids))))
            for number, teacher in enumerate(teachers)
        ]
        assert_equals_loop(folders, train, data.draw(st.sampled_from([1.0, 2.0, 0.5, None])))


def test_the_first_window_teaches_if_none_overlaps(tmp_path: Path) -> None:
    """The teacher has no token after the second character, and the second window none before the third."""
    texts = ["x" * 6]
    train = made_features(texts, [np.array([(0, 1), (1, 2), (3, 4), (4, 6)])], 0, (1, 0, 0), 2)
    teacher = made_features(texts, [np.array([(0, 1), (1, 2), (2, 3)])], 0, (1, 0, 1), 2)
    random = np.random.default_rng(0)
    folder = keep(tmp_path / "teacher", teacher, random.normal(0, 3, (2, len(teacher.input_ids))))
    assert_equals_loop([folder], train, 1.0)


def test_a_worked_example(tmp_path: Path) -> None:
    """The example at the top of the module: "Unhappily" as Un ##happi ##ly and as Unhap ##pily."""
    theirs = made_features(["Unhappily"], [np.array([(0, 2), (2, 7), (7, 9)])], 1, (1, 2, 1), 9)
    ours = made_features(["Unhappily"], [np.array([(0, 5), (5, 9)])], 1, (1, 1, 1), 9)
    p = np.array([0.1, 0.2, 0.3, 0.4])  # of [CLS], Un, ##happi, ##ly
    logits = np.full((2, len(theirs.input_ids)), 7.0)  # of a question, which must not matter
    logits[:, [0, 4, 5, 6]] = np.log(p)
    folder = keep(tmp_path / "run", theirs, logits)
    found = np.exp(align([folder], ours, temperature=1.0).padded(np.array([0]), 6)[:, 0])
    np.testing.assert_allclose(found, [[0.1, 0, 0, 0.5, 0.4, 0], [0.1, 0, 0, 0.2, 0.7, 0]], atol=1e-3)
    back = align([keep(tmp_path / "back", ours, np.log(np.full((2, 6), 0.5)))], theirs, temperature=1.0)
    found = np.exp(back.padded(np.array([0]), 8)[:, 0])
    for changed in ({"values": back.values + 1}, {"tops": back.tops + 1}):
        assert replace(back, **changed).sha256 != back.sha256
    third = 1 / 3  # of [CLS] and the two
    np.testing.assert_allclose(found[0], [third, 0, 0, 0, third, third, 0, 0], atol=1e-3)
    np.testing.assert_allclose(found[1], [third, 0, 0, 0, 0, third, third, 0], atol=1e-3)


@pytest.mark.parametrize(
    ("teacher", "student"), [("mpnet", "bert"), ("bert", "albert"), ("roberta", "bert"), ("bert", "roberta")]
)
@pytest.mark.parametrize("temperature", [1.0, None])
def test_real_tokenizers_teach_one_another(
    teacher: str, student: str, temperature: float | None, tmp_path: Path
) -> None:
    """Also awkward characters, and long contexts whose windows begin at other places."""
    texts = [*corpus()[:2], corpus()[-1]]
    examples = [example(text, id=f"q{n}", question="What? " * (n + 1)) for n, text in enumerate(texts)]
    options = WindowOptions(max_seq_length=64, doc_stride=16, max_query_length=16)
    theirs, train = (featurise(examples, tiny_tokenizer(family), options) for family in (teacher, student))
    assert len(train) > len(texts)
    random = np.random.default_rng(0)
    folder = keep(tmp_path / "run", theirs, random.normal(0, 3, (2, len(theirs.input_ids))))
    assert_equals_loop([folder], train, temperature)


# --- the objective ------------------------------------------------------------------------------------------------


def stored_teacher(student: ReaderModel, train: Features | None, *folders: str, **more: Any) -> Any:
    return make_learner(student, options(runs=list(folders), **more), 10, train=train).objective


def terms_of(objective: Any, student: ReaderModel, batch: Batch) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Its terms on a batch, and the gradients."""
    student.zero_grad()
    terms = objective(Forward(student, batch, None, objective.stored_logits(batch)), batch, Totals.of([batch]))
    terms["loss"].backward()
    gradients = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    return {name: value.item() for name, value in terms.items()}, [gradient.clone() for gradient in gradients]


@pytest.mark.parametrize("measure", ["kl", "mse"])
@pytest.mark.parametrize("over", ["all", "start"])
def test_with_the_same_tokens_it_equals_the_live_teacher(measure: str, over: str, tmp_path: Path) -> None:
    encoder = save_tiny_encoder(tmp_path / "encoder")
    teacher = loud(ReaderModel(load_encoder(str(encoder)), tiny_run_config()))
    teacher.save(tmp_path / "teacher")
    examples = some_examples()
    folder = kept_by(teacher, examples, tmp_path / "run")
    student = tiny_model(seed=3, dropout=False)
    train = windows_of(student, examples)
    batch = collate(train, np.array([4, 0, 2, 5]))
    stored = stored_teacher(student, train, folder, measure=measure, over=over, weight=2.0)
    live = make_learner(
        student,
        LearnerOptions.model_validate(
            {
                "distil": {
                    "name": "teacher",
                    "models": [str(tmp_path / "teacher")],
                    "measure": measure,
                    "over": over,
                    "weight": 2.0,
                }
            }
        ),
        10,
    ).objective
    ours, theirs = terms_of(stored, student, batch), terms_of(live, student, batch)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3)
    assert ours[0]["distillation"] > 0.1
    for gradient, expected in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-3)
    if measure == "mse":
        with torch.no_grad():
            taught = teacher(batch)
        torch.testing.assert_close(
            stored.stored_logits(batch)[:, batch.mask], taught[:, batch.mask], rtol=1e-3, atol=2e-3
        )
    assert stored.folders == (Path(folder),)
    assert stored.extra_forwards == 0


def test_temperature_and_the_weight_of_the_labels(tmp_path: Path) -> None:
    """labels · task + weight · T² · KL(softmax(z̄ / T) ‖ softmax(z / T)), in plain numbers."""
    teacher, student = loud(tiny_model(seed=1)), loud(tiny_model(seed=2, dropout=False))
    examples = some_examples()
    folder = kept_by(teacher, examples, tmp_path / "run")
    train = windows_of(student, examples)
    batch = collate(train, np.arange(len(train)))
    with torch.no_grad():
        theirs, own = (model(batch).masked_fill(~batch.mask, -1e9) / 3 for model in (teacher, student))
    p, q = theirs.softmax(2), own.softmax(2)
    divergence = (p * (p.clamp(min=1e-30) / q.clamp(min=1e-30)).log()).sum((0, 2)).mean() / 2 * 9
    terms, _ = terms_of(
        stored_teacher(student, train, folder, temperature=3.0, labels=0.25, weight=0.5), student, batch
    )
    assert terms["distillation"] == pytest.approx(divergence.item(), rel=1e-2)
    task = (terms["start"] + terms["end"]) / 2
    assert terms["loss"] == pytest.approx(0.25 * task + 0.5 * terms["distillation"], rel=1e-5)


def test_a_doubted_label_is_weighted_by_its_probability(tmp_path: Path) -> None:
    """Compared with a loop over the windows; windows that no run answers are not doubted, and none before it begins."""
    teacher, student = loud(tiny_model(seed=1)), loud(tiny_model(seed=2, dropout=False))
    examples = some_examples()
    folder = kept_by(teacher, examples[:4], tmp_path / "run")
    train = windows_of(student, examples)
    batch = collate(train, np.arange(len(train)))
    with torch.no_grad():
        taught, own = (model(batch).masked_fill(~batch.mask, -1e9).log_softmax(2) for model in (teacher, student))
    expected = 0.0
    for window in range(len(train)):
        at = [(0, window, int(batch.start[window])), (1, window, int(batch.end[window]))]
        belief = float(np.sqrt(np.prod([taught[label].exp() for label in at]))) if window < 4 else 1.0
        expected += belief * -float(np.mean([own[label] for label in at])) / len(train)
    doubting = stored_teacher(student, train, folder, doubt=True, weight=0.0)
    plain, _ = terms_of(stored_teacher(student, train, folder, weight=0.0), student, batch)
    terms, _ = terms_of(doubting, student, batch)
    assert terms["loss"] == pytest.approx(expected, rel=1e-2)
    assert terms["loss"] < 0.9 * plain["loss"]
    assert (terms["start"], terms["end"]) == (plain["start"], plain["end"])
    late, _ = terms_of(stored_teacher(student, train, folder, doubt=True, weight=0.0, warmup=0.5), student, batch)
    assert late["loss"] == plain["loss"]


def test_several_runs_teach_with_the_mean_of_their_probabilities(tmp_path: Path) -> None:
    models = [loud(tiny_model(seed=seed)) for seed in (1, 2)]
    examples = some_examples()
    folders = [kept_by(models[0], examples, tmp_path / "0"), kept_by(models[1], examples[:3], tmp_path / "1")]
    student = tiny_model(seed=3)
    train = windows_of(student, examples)
    batch = collate(train, np.arange(len(train)))
    with torch.no_grad():
        first, second = (model(batch).masked_fill(~batch.mask, -1e9).softmax(2) for model in models)
    expected = first.clone()
    expected[:, :3] = (first[:, :3] + second[:, :3]) / 2  # the last three are known to the first alone
    objective = stored_teacher(student, train, *folders)
    torch.testing.assert_close(objective.stored_logits(batch).exp(), expected, rtol=1e-2, atol=1e-3)
    assert objective.remark == "6 of 6 windows taught by the stored logits of 2 runs"
    objective = stored_teacher(student, train, *folders, measure="mse")
    with torch.no_grad():
        logits = torch.stack([model(batch) for model in models])
    taught = objective.stored_logits(batch)
    torch.testing.assert_close(
        taught[:, :3][:, batch.mask[:3]], logits.mean(0)[:, :3][:, batch.mask[:3]], rtol=1e-2, atol=5e-3
    )
    torch.testing.assert_close(
        taught[:, 3:][:, batch.mask[3:]], logits[0][:, 3:][:, batch.mask[3:]], rtol=1e-2, atol=5e-3
    )


@pytest.mark.parametrize("measure", ["kl", "mse"])
def test_questions_that_no_run_answers_are_not_taught(measure: str, tmp_path: Path) -> None:
    examples = some_examples()
    folder = kept_by(loud(tiny_model(seed=1)), examples[1:3], tmp_path / "run")
    student = tiny_model(seed=3, dropout=False)
    train = windows_of(student, examples)
    objective = stored_teacher(student, train, folder, measure=measure, labels=0.0)
    assert objective.remark == "2 of 6 windows taught by the stored logits of a run"
    terms, gradients = terms_of(objective, student, collate(train, np.array([0, 3, 4])))
    assert (terms["loss"], terms["distillation"]) == (0, 0)
    assert all(not gradient.any() for gradient in gradients)
    mixed, both = collate(train, np.array([0, 1])), collate(train, np.array([1]))
    terms, gradients = terms_of(objective, student, mixed)
    alone, of_one = terms_of(objective, student, both)
    share = 2 if measure == "kl" else float(mixed.mask.sum() / both.mask.sum())
    assert terms["distillation"] == pytest.approx(alone["distillation"] / share, rel=1e-4)
    assert all(gradient.isfinite().all() for gradient in gradients)
    for gradient, expected in zip(gradients, of_one, strict=True):
        torch.testing.assert_close(gradient * share, expected, rtol=1e-3, atol=1e-5)


def test_only_labels_count_during_warmup(tmp_path: Path) -> None:
    examples = some_examples()
    folder = kept_by(loud(tiny_model(seed=1)), examples, tmp_path / "run")
    student = tiny_model(seed=3, dropout=False)
    train = windows_of(student, examples)
    batch = collate(train, np.arange(3))
    late, at_once = (stored_teacher(student, train, folder, warmup=warmup, labels=0.0) for warmup in (0.2, 0.0))
    assert (late.capturable, at_once.capturable) == (False, True)
    for _ in range(2):
        terms, _ = terms_of(late, student, batch)
        assert terms["loss"] == pytest.approx((terms["start"] + terms["end"]) / 2)
        late.after_step()
    assert terms_of(late, student, batch)[0] == terms_of(at_once, student, batch)[0]


@pytest.mark.parametrize(("measure", "doubt"), [("kl", False), ("kl", True), ("mse", False)])
def test_its_loss_can_be_captured_as_a_graph(measure: str, doubt: bool, tmp_path: Path) -> None:
    """No branch on a value and no value read back: a graph captured with one batch is valid for all of its shape."""
    examples = some_examples()
    folder = kept_by(loud(tiny_model(seed=1)), examples[:3], tmp_path / "run")
    student = tiny_model(seed=3, dropout=False)
    train = windows_of(student, examples)
    objective = stored_teacher(student, train, folder, measure=measure, labels=0.5, doubt=doubt)
    taught, other = collate(train, np.array([1, 2])), collate(train, np.array([4, 1]))
    width = min(batch.mask.shape[1] for batch in (taught, other))
    totals = Totals(1.0, 1.0, 30.0)

    def loss(logits: torch.Tensor, stored_logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        class Given:
            def __call__(self) -> torch.Tensor:
                return logits

        forward: Any = Given()
        forward.stored_logits = stored_logits
        batch = replace(taught, mask=mask, is_context=taught.is_context[:, :width])
        result: torch.Tensor = objective(forward, batch, totals)["loss"]
        return result

    given = [
        (torch.randn(2, 2, width), objective.stored_logits(batch)[:, :, :width], batch.mask[:, :width])
        for batch in (taught, other)
    ]
    assert torch.isneginf(given[1][1][:, 0]).all()
    traced = make_fx(loss)(*given[0])
    for arguments in given:
        torch.testing.assert_close(traced(*arguments), loss(*arguments))


class Planted:
    """A reader with its own tokenizer that is sure of one word for every question."""

    gives_text, decoding, folders = True, DecodingOptions(), ()

    def __init__(self, family: str, examples: Sequence[Example], words: Sequence[str]) -> None:
        self.tokenizer, self.windows = tiny_tokenizer(family), tiny_run_config().windows
        self.features = featurise(examples, self.tokenizer, self.windows)
        self.words = words

    def logits(self, padded: Any) -> Any:
        found = np.zeros((2, *padded.mask.shape), np.float32)
        for row, window in enumerate(padded.windows):
            begin = TEXT.index(self.words[window])
            offsets = self.features.offsets[self.features.example[window]]
            first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
            last = int(np.searchsorted(offsets[:, 0], begin + len(self.words[window]))) - 1
            shift = int(self.features.context_begin[window])
            found[0, row, first + shift] = found[1, row, last + shift] = 12.0
        return found


def test_a_student_learns_from_the_teacher_what_the_labels_deny(tmp_path: Path) -> None:
    """Without labels, from a reader with another tokenizer: it answers as its teacher where the data has no answer."""
    examples = [example(TEXT, id=f"q{n}", question=f"{WORDS[n]} {WORDS[-n]}?") for n in range(1, 7)]
    words = ["Titan", "Huygens", "1655", "telescope", "built", "himself"]
    teacher = Planted("mpnet", examples, words)
    folder = kept_by(teacher, examples, tmp_path / "run")  # type: ignore[arg-type]
    student = tiny_model("bert", seed=0, dropout=False)
    train = windows_of(student, examples)
    assert not same_lengths(train, teacher.features)
    learner = make_learner(
        student, options(runs=[folder], labels=0.0).model_copy(update={"learning_rate": 5e-3}), 80, train=train
    )
    batch = collate(train, np.arange(len(train)))
    student.train()
    for _ in range(80):
        learner.add_gradients(batch, None, Totals.of([batch]))
        learner.step(0.0)
    answers = predict(student.eval(), examples)
    assert [prediction.text(0.0) for prediction in answers.values()] == words


def same_lengths(first: Features, second: Features) -> bool:
    return np.array_equal(first.lengths, second.lengths)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_run_that_cannot_teach_is_refused_in_one_line(tmp_path: Path) -> None:
    examples = some_examples()
    teacher, student = tiny_model(seed=1), tiny_model(seed=2)
    train = windows_of(student, examples)
    good = kept_by(teacher, examples, tmp_path / "good")
    (tmp_path / "empty").mkdir()
    halted = Path(kept_by(teacher, examples, tmp_path / "halted"))
    record = json.loads((halted / runs.RUN).read_text())
    (halted / runs.RUN).write_text(json.dumps({**record, "state": "unfinished"}))
    others = [replace(example, id=f"other{n}") for n, example in enumerate(examples)]
    apart = kept_by(teacher, others, tmp_path / "apart")
    changed = [*examples[:4], replace(examples[4], context=Context(TEXT + " "))]
    moved = kept_by(teacher, changed, tmp_path / "moved")
    answerability = tiny_model(learner={"task": "answerability"})
    cases: list[tuple[Any, Any, tuple[str, ...], dict[str, Any], str]] = [
        (
            student,
            train,
            (str(tmp_path / "empty"),),
            {},
            "expected a run with stored logits, found none; create it with: lamella",
        ),
        (
            student,
            train,
            (str(tmp_path / "nowhere"),),
            {},
            "expected a run with stored logits, found none; create it with: lamella",
        ),
        (
            student,
            train,
            (good, str(halted)),
            {},
            "halted: expected a finished run, found one that is unfinished",
        ),
        (student, train, (apart,), {}, "apart: expected stored logits for questions of data.train, found none"),
        (student, train, (good, moved), {}, "moved: question q4: expected the context of the training data"),
        (student, None, (good,), {}, "expected training texts that do not change, got data.augment"),
        (answerability, train, (good,), {}, "expected the task span"),
        (student, train, (good,), {"measure": "mse", "temperature": 2.0}, "temperature: expected the measure kl"),
        (student, train, (good,), {"labels": 0.0, "weight": 0.0}, "labels and weight: expected at least one above 0"),
        (student, train, (good,), {"measure": "mse", "doubt": True}, "doubt: expected the measure kl"),
        (student, train, (good,), {"temperature": 2.0, "doubt": True}, "doubt: expected temperature 1"),
        (student, train, (good,), {"labels": 0.0, "doubt": True}, "doubt: expected labels above 0"),
    ]
    for model, features, folders, more, message in cases:
        with pytest.raises(LamellaError) as caught:
            stored_teacher(model, features, *folders, **more)
        *headline, problem = str(caught.value).splitlines()
        assert headline in ([], ["learner.distil: 1 problem"])
        assert message in problem


def test_an_id_with_another_question_or_context_is_refused(tmp_path: Path) -> None:
    """As if a file got new ids: the same ids, contexts and questions, in other pairs."""
    examples, student = some_examples(), tiny_model(seed=2)
    train = windows_of(student, examples)
    turned = [replace(example, question=examples[n - 1].question) for n, example in enumerate(examples)]
    folder = kept_by(tiny_model(seed=1), turned, tmp_path / "turned")
    with pytest.raises(LamellaError) as caught:
        stored_teacher(student, train, folder)
    assert str(caught.value) == (
        f"{folder}: question q0: expected the question of the training data, 'Which ', found stored logits for "
        "'Which Which Which Which Which Which '; predict exactly these questions with --keep-logits."
    )
    ended = [replace(example, context=Context(TEXT + " Twice.")) for example in examples]
    folder = kept_by(tiny_model(seed=1), ended, tmp_path / "ended")
    with pytest.raises(LamellaError) as caught:
        stored_teacher(student, train, folder)
    assert str(caught.value) == (  # texts that begin alike are shown where they differ
        f"{folder}: question q0: expected the context of the training data, …'e had built himself.', found stored "
        "logits for …'e had built himself. Twice.'; predict exactly these questions with --keep-logits."
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["logits", "tops"])
@pytest.mark.parametrize("temperature", [1.0, None])
def test_logits_that_are_not_finite_are_refused(
    value: float, where: str, temperature: float | None, tmp_path: Path
) -> None:
    features = made_features(["Unhappily", "Happily"], [np.array([(0, 2), (2, 7)])] * 2, 1, (1, 2, 1), 9)
    folder = keep(tmp_path / "run", features, np.zeros((2, len(features.input_ids))))
    arrays = load_file(folder / runs.LOGITS)
    arrays[where][-1 if where == "tops" else features.rows[1] + features.context_begin[1], 1] = value
    save_file(arrays, folder / runs.LOGITS)
    index = json.loads((folder / runs.LOGITS_INDEX).read_text())
    del index["sha256"]  # as if it had been written before files were hashed
    (folder / runs.LOGITS_INDEX).write_text(json.dumps(index))
    with pytest.raises(LamellaError) as caught:
        align([folder], features, temperature=temperature)
    assert str(caught.value).startswith(f"{folder}: question q1: expected finite logits, found nan or infinity; ")


def test_the_advice_does_not_overwrite_a_folder_without_logits(tmp_path: Path) -> None:
    student = tiny_model(seed=2)
    train = windows_of(student, some_examples())
    taught = "expected a run with stored logits, found none; create it with: lamella predict TRAIN"
    trained, answered, new = (tmp_path / name for name in ("mpnet", "answered", "new"))
    with runs.new_run(trained, "train"):
        ReaderModel(load_encoder(str(save_tiny_encoder(tmp_path / "encoder"))), tiny_run_config()).save(
            trained / runs.MODEL
        )
    with runs.new_run(answered, "predict"):
        pass
    for folder, advice in {
        trained: f"--model {trained} --keep-logits --out {trained}-logits",
        answered: f"--model TEACHER --keep-logits --out {answered}-logits",
        new: f"--model TEACHER --keep-logits --out {new}",
    }.items():
        with pytest.raises(LamellaError) as caught:
            stored_teacher(student, train, str(folder))
        assert str(caught.value).splitlines()[-1].strip().endswith(f"{folder}: {taught} {advice}")


def test_older_runs_do_not_record_the_teacher(tmp_path: Path) -> None:
    examples, model = some_examples(), tiny_model(seed=1)
    before = kept_by(model, examples, tmp_path / "before")
    writer = LogitsWriter(model, {"name": "/far/away/model", "sha256": "abc"})
    predict(model, examples, sink=writer)
    writer.write(tmp_path / "after")
    student = tiny_model(seed=2)
    train = windows_of(student, examples)
    assert list(stored_teacher(student, train, before).teacher_facts) == []
    both = stored_teacher(student, train, before, str(tmp_path / "after")).teacher_facts
    assert [facts.model_dump(exclude_none=True) for facts in both] == [
        {"run": "before"},
        {"run": "after", "model": "away", "sha256": "abc"},
    ]


# --- runs ---------------------------------------------------------------------------------------------------------

SMALL = [
    "data.train=demo:train",
    "data.dev=demo:dev",
    "data.max_eval_samples=4",
    "windows.max_seq_length=128",
    "windows.doc_stride=32",
    "windows.max_query_length=24",
    "training.precision=fp32",
    "training.batch_size=8",
    "training.evaluate_every=100",
    "learner.learning_rate=0.01",
]


def settings_of(*changes: str) -> list[str]:
    return [word for change in (*SMALL, *changes) for word in ("--set", change)]


def test_an_mpnet_teaches_a_bert_through_the_command_line(lamella: Any, tmp_path: Path) -> None:
    teacher, student = (
        save_tiny_encoder(tmp_path / family, family, num_hidden_layers=1) for family in ("mpnet", "bert")
    )
    config, run = tmp_path / "run.toml", tmp_path / "teacher-train"
    config.write_text("")
    write(read("demo:train").examples[:16], tmp_path / "few.json")
    few = f"data.train={tmp_path / 'few.json'}"
    code, _, err = lamella("train", config, "--out", tmp_path / "teacher", *settings_of(f"encoder.name={teacher}", few))
    assert (code, err) == (0, "")
    code, _, err = lamella("predict", tmp_path / "few.json", "-m", tmp_path / "teacher", "--keep-logits", "--out", run)
    assert code == 0
    assert all("questions cut to 24 tokens" in line for line in err.splitlines())
    distil = f'learner.distil={{name = "stored", runs = ["{run}"], labels = 0.5, temperature = 2.0}}'
    changes = settings_of(f"encoder.name={student}", few, distil)
    code, out, err = lamella("train", config, "--out", tmp_path / "student", *changes)
    assert (code, err) == (0, "")
    windows = out.split("questions in ")[1].split(" windows")[0]
    assert f"{windows} of {windows} windows taught by the stored logits of a run" in out
    lines = [json.loads(line) for line in (tmp_path / "student" / runs.HISTORY).read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert len(steps) > 4
    for step in steps:
        task = (step["start"] + step["end"]) / 2
        assert step["loss"] == pytest.approx(0.5 * task + step["distillation"], rel=1e-4)
    assert steps[-1]["distillation"] < steps[0]["distillation"]

    weights = tmp_path / "teacher" / runs.MODEL / "model.safetensors"
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    named = {"name": str(tmp_path / "teacher"), "base": str(teacher), "sha256": sha256}
    assert json.loads((run / runs.LOGITS_INDEX).read_text())["model"] == named
    record = json.loads((run / runs.RUN).read_text())["model"]
    assert (record["name"], record["sha256"], record["tuning"]["name"]) == (named["name"], sha256, "full")
    expected_facts = [{"run": "teacher-train", "model": "teacher", "sha256": sha256}]
    asked = ("demo:dev", "--model", tmp_path / "student", "--out", tmp_path / "asked")
    assert lamella("evaluate", *asked)[0] == 0
    for model in (tmp_path / "student" / runs.MODEL / "config.json", tmp_path / "asked" / runs.RUN):
        content = json.loads(model.read_text())
        assert content.get("model", content)["facts"]["teachers"] == expected_facts
    card = (tmp_path / "student" / runs.MODEL / "README.md").read_text()
    assert f"| teachers | `teacher` (sha256 `{sha256}`) |" in card
    for name in ("student", "asked"):
        code, _, err = lamella("compare", tmp_path / name, "--keep", tmp_path / "kept")
        assert (code, err) == (0, "")
        kept = (tmp_path / "kept" / f"{name}.json").read_text()
        assert json.loads(kept)["teachers"] == expected_facts
        assert str(tmp_path) not in kept
    code, _, err = lamella("compare", tmp_path / "teacher", "--keep", tmp_path / "alone.json")
    assert (code, "teachers" in json.loads((tmp_path / "alone.json").read_text())) == (0, False)

    code, _, err = lamella("train", config, "--out", run, "--overwrite", *changes)
    assert code != 0
    assert "which this run reads" in err
    assert (run / runs.LOGITS).is_file()
    code, _, err = lamella("train", config, "--out", tmp_path / "eda", *changes, "--set", "data.augment=eda")
    assert (code, "data.augment, which changes them every epoch" in err) == (2, True)
    assert not (tmp_path / "eda").exists()


class Killed(BaseException):
    """Simulates a kill."""


def test_a_run_does_not_resume_with_other_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = save_tiny_encoder(tmp_path / "tiny", num_hidden_layers=1)
    examples = read("demo:train").examples[:4]
    kept_by(loud(tiny_model(seed=1)), examples, tmp_path / "teacher")
    table = {
        "data": {"train": "demo:train", "max_train_samples": 4},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(encoder)},
        "learner": {"learning_rate": 1e-3, "distil": {"name": "stored", "runs": [str(tmp_path / "teacher")]}},
        "training": {"epochs": 2, "batch_size": 4, "precision": "fp32", "checkpoint_every": "2 steps"},
    }
    plan = make_plan(table, where="tests")
    train_plan(plan, tmp_path / "whole")
    saved = bookkeeping.Bookkeeper.save_checkpoint

    def save_and_die(*arguments: Any) -> None:
        saved(*arguments)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(bookkeeping.Bookkeeper, "save_checkpoint", save_and_die)
        with pytest.raises(Killed):
            train_plan(plan, tmp_path / "out")
    shutil.move(tmp_path / "teacher", tmp_path / "before")
    kept_by(loud(tiny_model(seed=2)), examples, tmp_path / "teacher")
    with pytest.raises(RunError, match="expected the kept logits that the run began with"):
        train_plan(plan, tmp_path / "out", resume=True)
    shutil.rmtree(tmp_path / "teacher")
    shutil.move(tmp_path / "before", tmp_path / "teacher")
    train_plan(plan, tmp_path / "out", resume=True)
    weights = [sorted((tmp_path / name / runs.MODEL).rglob("*.safetensors")) for name in ("whole", "out")]
    assert weights[0]
    assert [path.read_bytes() for path in weights[0]] == [path.read_bytes() for path in weights[1]]
    histories = [timeless_history(tmp_path / name / runs.HISTORY) for name in ("whole", "out")]
    assert histories[0] == histories[1]
