"""Contexts made longer by others of the data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lamella.data.dataset import load_examples
from lamella.data.long_contexts import lengthen_contexts
from lamella.data.negatives import with_negatives
from lamella.errors import UsageError
from samples import example


def test_answers_move_with_their_context() -> None:
    examples = load_examples("demo:dev").examples
    longer = lengthen_contexts(examples, 4000)
    assert [question.id for question in longer] == [f"{question.id}-long" for question in examples]
    for before, after in zip(examples, longer, strict=True):
        assert before.context.text in after.context.text
        assert [answer.text for answer in after.answers] == [answer.text for answer in before.answers]
        for answer in (*after.answers, *after.plausible_answers):
            assert after.context.text[answer.begin_char : answer.end_char] == answer.text


def test_contexts_reach_the_length() -> None:
    examples = load_examples("demo:dev").examples
    longest = max(len(question.context.text) for question in examples)
    longer = [len(question.context.text) for question in lengthen_contexts(examples, 4000)]
    assert max(longer) <= 4000 + longest + 2
    # Each text contains some answers, such as the name of a ring, "D".
    assert sum(size >= 4000 for size in longer) > 0.95 * len(longer)


def test_no_other_context_contains_the_answer() -> None:
    texts = [f"Ship {n} sailed to {'Malta' if n % 2 else 'Crete'} in {1800 + n}." for n in range(20)]
    examples = [example(text, text.split()[4], id=f"q{n}") for n, text in enumerate(texts)]
    for question in lengthen_contexts(examples, 300):
        assert question.context.text.lower().count(question.answers[0].text.lower()) == 1


def test_no_other_context_answers_a_negative() -> None:
    texts = [f"Ship {n} sailed to port {n}{n}." for n in range(10, 22)]
    answered = [example(text, text.split()[-1][:-1], id=f"q{n}") for n, text in enumerate(texts)]
    others = [example(text, id=f"u{n}") for n, text in enumerate(texts)]  # every text stays among the contexts
    mixed = with_negatives([*answered, *others], 0.5)
    answers = {question.id: question.answers[0].text for question in answered}
    negatives = 0
    for question in lengthen_contexts(mixed.examples, 10_000, lost_answers=mixed.lost_answers):
        name = question.id.removesuffix("-long")
        if name.endswith("-negative"):
            assert answers[name.removesuffix("-negative")] not in question.context.text
            assert question.context.text.count("Ship") == 11
            negatives += 1
    assert negatives == mixed.made == 6


@pytest.mark.parametrize("id", ["a-negative", "a-negative-2"])
def test_negatives_whose_answers_are_not_known_are_refused(id: str) -> None:
    examples = [example("One text.", id=id), example("Another text.", id="b")]
    with pytest.raises(UsageError, match=rf"'{id}'.*--negatives with --lengthen"):
        lengthen_contexts(examples, 100)


def test_the_same_article_comes_first() -> None:
    examples = load_examples("demo:train").examples
    question = next(one for one in examples if not one.answerable)
    own = {one.context.text for one in examples if one.context.title == question.context.title}
    size = sum(map(len, own)) // 2
    (longer,) = [one for one in lengthen_contexts(examples, size) if one.id == f"{question.id}-long"]
    assert set(longer.context.text.split("\n\n")) <= own


def test_the_place_varies_and_the_seed_chooses_it() -> None:
    examples = load_examples("demo:dev").examples
    longer = lengthen_contexts(examples, 4000)
    places = {after.context.text.index(before.context.text) for before, after in zip(examples, longer, strict=True)}
    assert len(places) > len(examples) / 10
    assert [one.context.text for one in lengthen_contexts(examples, 4000)] == [one.context.text for one in longer]
    assert [one.context.text for one in lengthen_contexts(examples, 4000, seed=1)] != [
        one.context.text for one in longer
    ]


def test_too_little_text_gives_what_there_is() -> None:
    examples = [example("One text.", id="a"), example("Another text.", id="b")]
    assert [len(one.context.text) for one in lengthen_contexts(examples, 10_000)] == [24, 24]


def test_questions_about_several_contexts_are_refused() -> None:
    examples = [replace(example("A text.", id=f"q{n}"), group="g") for n in range(2)]
    with pytest.raises(UsageError, match="one context each"):
        lengthen_contexts(examples, 100)
