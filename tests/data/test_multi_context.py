"""Questions with several contexts: made from questions with one, limited in training, counted as questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella import load_examples
from lamella.config import RunConfig
from lamella.data.context_choice import choose_contexts, in_given_order
from lamella.data.examples import Answer, Context, Example
from lamella.data.multi_context import with_contexts
from lamella.data.negatives import fold_text, group_questions
from lamella.errors import ConfigError, UsageError
from lamella.progress import silent
from lamella.validation import check_config


def question(id: str, labels: str) -> list[Example]:
    """A question whose contexts contain the answer where `labels` has a 1."""
    return [
        Example(f"{id}#{at}", "?", Context(f"{id} {at} x"), (Answer("x", 4),) if label == "1" else (), group=id)
        for at, label in enumerate(labels)
    ]


def ids(examples: list[Example]) -> list[str]:
    return [example.id for example in examples]


def test_every_question_gets_its_context_among_others_without_the_answer() -> None:
    examples = load_examples("demo:dev").examples
    made = with_contexts(examples, 4)
    by_question = {group.id: group.examples for group in group_questions(made.examples)}
    assert made.questions == len(by_question) == len(examples)
    assert made.short == 1  # a short answer that nearly every context contains
    for example in examples:
        contexts = by_question[example.id]
        assert [context.id for context in contexts] == [f"{example.id}#{at}" for at in range(len(contexts))]
        assert len({context.context.text for context in contexts}) == len(contexts) <= 4
        (own,) = [context for context in contexts if context.context.text == example.context.text]
        assert (own.answers, own.plausible_answers) == (example.answers, example.plausible_answers)
        for context in contexts:
            if context is not own:
                assert not context.answers
                assert not any(fold_text(answer.text) in fold_text(context.context.text) for answer in example.answers)
    # As in a search, the own context is often the first, and not always.
    firsts = [by_question[example.id][0].context.text == example.context.text for example in examples]
    assert 0.5 < sum(firsts) / len(firsts) < 1


def test_questions_that_have_several_contexts_keep_some_of_them() -> None:
    made = with_contexts([*question("a", "0010"), *question("b", "10")], 3)
    assert ids(list(made.examples)) == ["a#0", "a#1", "a#2", "b#0", "b#1"]
    assert (made.questions, made.short) == (2, 1)


def test_a_share_of_the_questions_keeps_no_context_with_an_answer() -> None:
    examples = load_examples("demo:dev").examples
    answerable = [example.id for example in examples if example.answerable]
    made = with_contexts(examples, 3, negatives=0.25)
    still = {example.group for example in made.examples if example.answerable}
    assert len(still) == len(answerable) - round(0.25 * len(answerable))
    assert made == with_contexts(examples, 3, negatives=0.25) != with_contexts(examples, 3, negatives=0.25, seed=1)
    several = with_contexts([*question("a", "0010"), *question("b", "10")], 3, negatives=1.0).examples
    assert ids(list(several)) == ["a#0", "a#1", "a#3", "b#1"]


def test_a_question_whose_every_context_has_the_answer_keeps_it_and_is_counted() -> None:
    titan = Example("t", "Which moon?", Context("Titan is a moon."), (Answer("Titan", 0),))
    other = Example("r", "Which other?", Context("Rhea, not Titan."), (Answer("Rhea", 0),))
    made = with_contexts([titan, other, *question("a", "11")], 1, negatives=1.0)
    assert [(example.id, example.answerable) for example in made.examples] == [
        ("t#0", False),
        ("r#0", False),
        ("a#0", True),
    ]
    assert made.impossible == 1
    made = with_contexts([titan, other], 2, negatives=1.0)
    assert [(example.id, example.context.text) for example in made.examples] == [
        ("t#0", titan.context.text),
        ("r#0", titan.context.text),
    ]
    assert (made.questions, made.short, made.impossible) == (2, 2, 1)


def test_an_id_that_another_question_has_is_refused() -> None:
    examples = [Example("q", "Who?", Context("one")), Example("q#1", "What?", Context("two"))]
    with pytest.raises(UsageError, match=r"the id 'q#1' is that of another question"):
        with_contexts(examples, 2)


def test_the_order_and_the_number_of_contexts() -> None:
    examples = [*question("a", "0101"), *question("b", "000")]
    assert ids(choose_contexts(examples, 2)) == ["a#1", "a#3", "b#0", "b#1"]
    assert ids(choose_contexts(examples, 2, order="given")) == ["a#0", "a#1", "b#0", "b#1"]
    # Ids tell the given order, even where the file has another.
    shuffled = [examples[at] for at in (2, 0, 3, 1)]
    assert ids(in_given_order(group_questions(shuffled)[0])) == ["a#0", "a#1", "a#2", "a#3"]
    assert ids(choose_contexts(shuffled, 1, order="given")) == ["a#0"]


@given(
    st.lists(st.text("01", min_size=1, max_size=5), min_size=1, max_size=8),
    st.one_of(st.none(), st.integers(1, 5)),
    st.one_of(st.none(), st.floats(0, 3)),
    st.sampled_from(["answerable_first", "given"]),
)
def test_limits_hold_and_nothing_else_is_lost(
    labels: list[str], count: int | None, negatives: float | None, order: Any
) -> None:
    examples = [example for at, label in enumerate(labels) for example in question(f"q{at}", label)]
    chosen = choose_contexts(examples, count, order=order, negatives=negatives)
    kept = {group.id: group.examples for group in group_questions(chosen)}
    without = sum(not example.answerable for example in chosen)
    if negatives is not None:
        assert without <= negatives * (len(chosen) - without)
    for at, label in enumerate(labels):
        group = kept.get(f"q{at}", ())
        assert len(group) <= (count or 5)
        expected = min(count or 5, label.count("1")) if order == "answerable_first" else label[:count].count("1")
        assert sum(example.answerable for example in group) == expected
    if count is None and negatives is None:
        assert chosen == examples


@pytest.fixture
def several(tmp_path: Path) -> Path:
    entries = [
        {"qa": {"id": f"q{n}", "question": "Which?", "answer": f"a{n}"},
         "paragraphs": [{"title": f"t{at}", "contents": f"a{n} {at}" if at == 2 else f"none {at}"} for at in range(4)]}
        for n in range(6)
    ]  # fmt: skip
    (tmp_path / "several.json").write_text(json.dumps({"data": entries}))
    return tmp_path / "several.json"


def read_train(train: Path | str, **data: Any) -> list[str]:
    from lamella.training.splits import read_splits

    config = RunConfig.model_validate({"data": {"train": str(train), **data}})
    return [example.id for example in read_splits(config, log=silent).train_examples]


def test_a_run_file_limits_the_contexts_of_training(several: Path) -> None:
    pytest.importorskip("torch")
    assert len(read_train(several)) == 24
    assert read_train(several, max_train_samples=2) == [f"q{n}#{at}" for n in range(2) for at in range(4)]
    first = read_train(several, max_train_samples=2, contexts_per_question=2)
    assert first == ["q0#0", "q0#2", "q1#0", "q1#2"]
    assert read_train(several, max_train_samples=1, contexts_per_question=2, context_order="given") == ["q0#0", "q0#1"]
    assert read_train(several, max_train_samples=2, negative_contexts=0.5) == ["q0#2", "q1#0", "q1#2"]
    with pytest.raises(ConfigError, match="expected training questions about several contexts"):
        read_train("demo:train", contexts_per_question=2)


def test_options_that_do_not_fit_together(several: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.context_order: needs data\.contexts_per_question"):
        check_config({"data": {"train": str(several), "context_order": "given"}}, where="test")
    # A run that does not use these options is stored as before they existed.
    assert not {"contexts_per_question", "context_order", "negative_contexts"} & set(RunConfig().model_dump()["data"])
    chosen = RunConfig.model_validate({"data": {"contexts_per_question": 3}}).model_dump()["data"]
    assert chosen["contexts_per_question"] == 3


def test_the_commands_count_questions_as_questions(several: Path, lamella: Any, tmp_path: Path) -> None:
    code, out, err = lamella("check", several)
    assert err == ""
    assert "4 articles, 9 contexts, 6 questions (0 unanswerable); 4.0 contexts per question, 18 of them without" in out
    target = tmp_path / "out.jsonl"
    code, out, err = lamella("convert", "demo:dev", target, "--multi-context", 3)
    assert (code, err) == (0, "")
    assert out == f"{target}: 135 questions (0 fixed, 0 skipped), 403 contexts; 1 question with fewer than 3\n"
    examples = load_examples(str(target)).examples
    assert len(group_questions(examples)) == 135
    single = tmp_path / "single.jsonl"
    single.write_text('{"id": "t", "question": "Which?", "context": "Titan.", "answers": ["Titan"]}')
    code, out, err = lamella("convert", single, target, "--multi-context", 2, "--negatives", 1.0, "--overwrite")
    assert (code, err) == (0, "")
    assert out.endswith(
        "1 context; 1 question with fewer than 2; 1 question unchanged, as no other context lacks the answer\n"
    )
    assert [example.answerable for example in load_examples(str(target)).examples] == [True]
    code, _, err = lamella("convert", "demo:dev", tmp_path / "no.json", "--multi-context", 3, "--lengthen", 900)
    assert (code, err) == (2, "lamella: convert --multi-context: cannot be combined with --lengthen.\n")
    assert not (tmp_path / "no.json").exists()
