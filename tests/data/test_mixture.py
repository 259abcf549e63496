"""The mixture of training files: weights and negatives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lamella.config import TrainFile, TrainingOptions
from lamella.data.examples import Example
from lamella.data.mixture import MOST_EPOCHS, Mixture, mix
from lamella.errors import DataError
from samples import example


def questions(count: int, prefix: str) -> list[Example]:
    return [
        example(
            f"The {prefix} stone {number} is gem{number} here.",
            f"gem{number}",
            f"Which stone {number}?",
            f"{prefix}{number}",
        )
        for number in range(count)
    ]


def made(*files: tuple[TrainFile, list[Example]], **training: float) -> Mixture:
    mixture = mix(files, TrainingOptions(**{"epochs": 4, **training}))
    assert mixture is not None
    return mixture


def taken(mixture: Mixture, epoch: int) -> Counter[str]:
    counts = mixture.counts_of(mixture.examples, epoch)
    return Counter({example.id: int(count) for example, count in zip(mixture.examples, counts, strict=True) if count})


def test_plain_files_need_no_mixture() -> None:
    assert mix([(TrainFile(file="a"), questions(3, "a")), (TrainFile(file="b"), [])], TrainingOptions()) is None


def test_a_weight_repeats_questions_and_a_plain_file_stays() -> None:
    mixture = made(
        (TrainFile(file="a"), questions(30, "a")),
        (TrainFile(file="b", weight=2.5), questions(200, "b")),
        (TrainFile(file="c", weight=0.25), questions(200, "c")),
    )
    for epoch in range(4):
        counts = taken(mixture, epoch)
        assert all(counts[f"a{number}"] == 1 for number in range(30))
        assert {counts[f"b{number}"] for number in range(200)} == {2, 3}
        assert sum(counts[f"b{number}"] for number in range(200)) == pytest.approx(500, abs=25)
        assert sum(counts[f"c{number}"] for number in range(200)) == pytest.approx(50, abs=25)
    assert taken(mixture, 0) != taken(mixture, 1)


def test_negatives_are_drawn_again_every_epoch() -> None:
    mixture = made((TrainFile(file="a", negatives=0.5), questions(200, "a")))
    by_id = {example.id: example for example in mixture.examples}
    contexts: dict[str, list[str]] = {}
    for epoch in range(4):
        counts = taken(mixture, epoch)
        assert counts.total() == 200  # each question once, as it is or as a negative
        assert len({mixture.questions[id] for id in counts}) == 200
        negatives = [id for id in counts if not by_id[id].answerable]
        assert len(negatives) == pytest.approx(100, abs=30)
        for id in negatives:
            contexts.setdefault(mixture.questions[id], []).append(by_id[id].context.text)
    repeated = [texts for texts in contexts.values() if len(texts) > 1]
    assert len(repeated) > 50
    assert all(len(set(texts)) == len(texts) for texts in repeated)


def test_unanswerable_questions_stay() -> None:
    unanswerable = [replace(one, answers=()) for one in questions(20, "u")]
    mixture = made((TrainFile(file="a", negatives=1.0), [*questions(20, "a"), *unanswerable]))
    counts = taken(mixture, 0)
    assert all(counts[f"u{number}"] == 1 for number in range(20))
    assert not any(counts[f"a{number}"] for number in range(20))
    assert mixture.shares[0].unanswerable == mixture.shares[0].examples == 40


def test_a_question_about_several_contexts_is_taken_with_one() -> None:
    contexts = [
        replace(one, group=f"g{number // 4}", question="Which stone?", answers=one.answers if number % 4 < 2 else ())
        for number, one in enumerate(questions(400, "x"))
    ]
    mixture = made((TrainFile(file="a", negatives=0.25), contexts))
    by_id = {example.id: example for example in mixture.examples}
    for epoch in range(4):
        counts = taken(mixture, epoch)
        assert counts.total() == 100
        assert {mixture.questions[id] for id in counts} == {f"g{number}" for number in range(100)}
        assert sum(not by_id[id].answerable for id in counts) == pytest.approx(25, abs=13)
    own = {example.group: set() for example in contexts}
    for one in contexts:
        own[one.group].add(one.context.text)
    assert all(example.context.text in own[mixture.questions[example.id]] for example in mixture.examples)


def test_the_order_seed_decides() -> None:
    file = (TrainFile(file="a", weight=1.5, negatives=0.5), questions(50, "a"))
    assert np.array_equal(made(file).counts, made(file).counts)
    assert taken(made(file), 0) != taken(made(file, order_seed=1), 0)


def test_long_training_repeats_the_epochs_that_were_drawn() -> None:
    file = (TrainFile(file="a", weight=0.5), questions(40, "a"))
    mixture = made(file, epochs=100)
    assert len(mixture.counts) == MOST_EPOCHS
    assert taken(mixture, 1) == taken(mixture, MOST_EPOCHS + 1)
    assert len(made(file, max_steps=5, batch_size=8).counts) == 2  # 40 examples in epochs of 20


def test_augmented_copies_are_counted_by_their_ids() -> None:
    mixture = made((TrainFile(file="a", weight=2), questions(5, "a")))
    first, second = mixture.examples[:2]
    copies = [first, first, second]
    assert mixture.counts_of(copies, 0).tolist() == [2, 2, 2]


def test_negatives_have_ids_of_their_own() -> None:
    drawn, plain = (
        questions(3, "a"),
        [replace(question, id=f"{question.id}-negative") for question in questions(3, "a")],
    )
    mixture = made((TrainFile(file="a", negatives=1), drawn), (TrainFile(file="b"), plain))
    assert len({example.id for example in mixture.examples}) == len(mixture.examples)
    assert mixture.questions["a0-negative"] == "a0-negative"
    assert mixture.questions["a0+-negative"] == "a0"


def test_an_epoch_without_questions_is_refused() -> None:
    with pytest.raises(DataError, match=r"^a: expected every epoch to take some questions, .* raise the weights"):
        made((TrainFile(file="a", weight=0.01), questions(3, "a")))
