"""Holding out whole articles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lamella.data.dataset import load_examples
from lamella.data.examples import Context, Example
from lamella.data.hold_out import hold_out
from samples import example


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_whole_articles_with_about_a_share_of_the_questions(share: float) -> None:
    examples = load_examples("demo:train").examples  # nine articles of 45 questions
    kept, held = hold_out(examples, share)
    titles = [{one.context.title for one in part} for part in (kept, held)]
    assert not titles[0] & titles[1]
    assert sorted(one.id for one in (*kept, *held)) == sorted(one.id for one in examples)
    assert len(held) / len(examples) == pytest.approx(share, abs=0.5 / 9 + 1e-9)


def test_the_seed_chooses_the_articles() -> None:
    examples = load_examples("demo:train").examples
    assert hold_out(examples, 0.3) == hold_out(examples, 0.3)
    assert hold_out(examples, 0.3, seed=1) != hold_out(examples, 0.3)


def test_the_contexts_of_a_question_stay_together() -> None:
    examples = [replace(example(f"Text {n}.", id=f"q{n}"), group=f"g{n // 5}") for n in range(50)]
    kept, held = hold_out(examples, 0.2)
    assert {one.group for one in kept}.isdisjoint({one.group for one in held})
    assert len(held) == 10


def test_contexts_without_a_title_are_articles() -> None:
    examples = [example(f"Text {n}.", id=f"q{n}") for n in range(40)]
    _, held = hold_out(examples, 0.25)
    assert len(held) == 10


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_context_under_several_titles_is_on_one_side(share: float) -> None:
    texts = [f"Text {n}." for n in range(40)]
    texts[3::10] = ["A text of several  articles."] * 4
    examples = [Example(f"q{n}", "What?", Context(text, f"title {n // 2}")) for n, text in enumerate(texts)]
    chained = [Example(f"c{n}", "What?", Context(f"Text {n}.", f"title {n // 2 + 1}")) for n in (0, 2, 4)]
    kept, held = hold_out([*examples, *chained], share)
    assert {one.context.text for one in kept}.isdisjoint({one.context.text for one in held})
    assert {one.context.title for one in kept}.isdisjoint({one.context.title for one in held})
    assert held


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_questions_that_share_any_of_their_contexts_are_on_one_side(share: float) -> None:
    # Questions 4n to 4n + 3 form a chain: each shares a context with the next, and only white space may differ.
    texts = [(f"Text {n}.", f"Text  {n + 1}." if n % 4 < 3 else f"Last text {n}.") for n in range(40)]
    examples = [
        Example(f"q{n}#{place}", "What?", Context(text), group=f"q{n}")
        for n, pair in enumerate(texts)
        for place, text in enumerate(pair)
    ]
    kept, held = hold_out(examples, share)
    sides = [{" ".join(one.context.text.split()) for one in part} for part in (kept, held)]
    assert sides[0].isdisjoint(sides[1])
    assert len(held) == pytest.approx(share * len(examples), abs=4)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1.0, 405)])
def test_none_and_all(share: float, count: int) -> None:
    assert len(hold_out(load_examples("demo:train").examples, share)[1]) == count
