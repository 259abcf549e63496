"""Negatives: questions with a similar context that does not contain the answer."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lamella.data.dataset import load_examples
from lamella.data.examples import Answer, Example
from lamella.data.negatives import NEGATIVE, NegativeContexts, Question, group_questions, with_negatives
from samples import example

TITAN = example("Huygens discovered the moon Titan in 1655.", "Huygens", "Who discovered the moon Titan?", "titan")
RHEA = example("Cassini discovered the moon Rhea in 1672.", "Cassini", "Who discovered the moon Rhea?", "rhea")
ALSO_HUYGENS = example("The moon Titan was named long after HUYGENS  had died.", None, "Who died?", "named")
BREAD = example("Bread is made of flour.", "flour", "What is bread made of?", "bread")
EVERYTHING = [TITAN, RHEA, ALSO_HUYGENS, BREAD]


def questions(*examples: Example) -> list[Question]:
    return group_questions(examples)


def test_the_context_is_the_most_similar_without_the_answer() -> None:
    contexts = NegativeContexts(EVERYTHING)
    titan, rhea, _, bread = questions(*EVERYTHING)
    # The text about Titan's name shares more words, but it contains the answer in another case.
    assert contexts.best(titan, 3) == [RHEA.context, BREAD.context]
    assert contexts.best(rhea, 1) == [TITAN.context]
    assert len(contexts.best(bread, 9)) == 3


def test_white_space_and_case_hide_no_answer() -> None:
    answered = example("Christiaan Huygens found it.", "Christiaan Huygens", "Who found it?", "a")
    other = example("It was CHRISTIAAN\n  HUYGENS who found it.", None, "Who?", "b")
    assert NegativeContexts([answered, other]).best(questions(answered)[0], 5) == []


@pytest.mark.parametrize("answer", ["Zoë Émile", "이순신"])
def test_the_normal_form_hides_no_answer(answer: str) -> None:
    answered = example(f"{answer} found it.", answer, "Who found it?", "a")
    other = example(f"It was {unicodedata.normalize('NFD', answer)} who found it.", None, "Who?", "b")
    for first, second in ((answered, other), (example(other.context.text, None), answered)):
        question = replace(first, answers=(Answer(answer, 0),))
        assert NegativeContexts([question, second]).best(questions(question)[0], 5) == []


def test_the_first_of_equal_contexts_comes_first() -> None:
    examples = [example(f"text {number}", None, "Huh?", f"q{number}") for number in range(1000)]
    contexts = NegativeContexts(examples)
    found = contexts.best(questions(examples[0])[0], 999)
    assert found == [one.context for one in examples[1:]]


def test_many_contexts_are_ranked_as_by_sorting_them_all() -> None:
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(50)]
    examples = [
        example(" ".join(rng.choice(words, 12)), None, " ".join(rng.choice(words, 5)), f"q{number}")
        for number in range(300)
    ]
    contexts = NegativeContexts(examples)
    for question in group_questions(examples)[:5]:
        scores = contexts._ranking.scores(question.examples[0].question)
        own = question.examples[0].context.text
        ranked = [number for number in np.argsort(-scores, kind="stable") if examples[number].context.text != own]
        found = contexts.best(question, 299)
        assert [scores[ranked[place]] for place in range(299)] == [
            scores[next(number for number, one in enumerate(examples) if one.context is context)] for context in found
        ]


def test_a_share_of_the_answerable_questions_becomes_negatives() -> None:
    examples = load_examples("demo:dev").examples
    answerable = [example for example in examples if example.answerable]
    mixed = with_negatives(examples, 0.5)
    negatives = [example for example in mixed.examples if example.id.endswith(NEGATIVE)]
    assert len(mixed.examples) == len(examples)
    assert len(negatives) == mixed.made == round(0.5 * len(answerable))
    assert mixed.impossible == 0
    originals = {example.id: example for example in examples}
    for negative in negatives:
        original = originals[negative.id.removesuffix(NEGATIVE)]
        assert negative.question == original.question
        assert not negative.answerable
        assert negative.context.text != original.context.text
        assert not any(answer.text.casefold() in negative.context.text.casefold() for answer in original.answers)
    unchanged = [example for example in mixed.examples if not example.id.endswith(NEGATIVE)]
    assert all(originals[example.id] is example for example in unchanged)


def test_the_seed_chooses_the_questions() -> None:
    examples = load_examples("demo:dev").examples

    def ids(seed: int) -> list[str]:
        return [example.id for example in with_negatives(examples, 0.3, seed=seed).examples]

    assert ids(0) == ids(0) != ids(1)


def test_a_question_about_several_contexts_keeps_one_of_its_own() -> None:
    def asked(texts: Sequence[str], group: str) -> list[Example]:
        return [
            replace(
                example(text, "Huygens" if "Huygens" in text else None, "Who discovered Titan?", f"{group}-{number}"),
                group=group,
            )
            for number, text in enumerate(texts)
        ]

    found = asked(["Bread and Titan.", "It was Huygens who discovered Titan.", "Who discovered Rhea? Cassini."], "g1")
    missing = asked(["Bread is old.", "Who discovered Titan is unknown."], "g2")
    kept = with_negatives([*found, *missing], 0.0).examples
    assert [(one.id, one.context.text) for one in kept] == [
        ("g1", "It was Huygens who discovered Titan."),
        ("g2", "Who discovered Titan is unknown."),
    ]
    changed = with_negatives([*found, *missing], 1.0).examples
    assert [(one.id, one.context.text, one.answerable, one.group) for one in changed] == [
        ("g1-negative", "Who discovered Rhea? Cassini.", False, None),
        ("g2", "Who discovered Titan is unknown.", False, None),
    ]


def test_a_question_without_another_context_stays_as_it_is() -> None:
    mixed = with_negatives([TITAN], 1.0)
    assert mixed.examples == (TITAN,)
    assert (mixed.made, mixed.impossible) == (0, 1)


@pytest.mark.parametrize(("share", "chosen"), [(0.0, 0), (0.1, 9), (1.0, 90)])
def test_shares(share: float, chosen: int) -> None:
    mixed = with_negatives(load_examples("demo:dev").examples, share)
    assert mixed.made + mixed.impossible == chosen


def test_the_id_of_a_negative_is_not_that_of_another_question() -> None:
    others = [replace(RHEA, id="titan-negative"), replace(BREAD, id="titan+")]
    for seed in range(6):
        for share in (0.4, 1):
            mixed = with_negatives([TITAN, *others], share, seed=seed).examples
            assert len({example.id for example in mixed}) == 3
    assert [example.id for example in mixed] == ["titan++-negative", "titan-negative-negative", "titan+-negative"]
