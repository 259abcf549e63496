"""Multi-context data: give questions with one context others that do not contain the answer.

The set looks like the result of a search: every question has the passages of the data that share most words with it,
among them its own, ordered by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lamella.data.context_choice import choose_contexts
from lamella.data.examples import Example
from lamella.data.negatives import NegativeContexts, Question, draw_answerable, group_questions, ids_of
from lamella.errors import UsageError, shorten
from lamella.progress import progress


@dataclass(frozen=True)
class MultiContextExamples:
    """Examples of questions with several contexts."""

    examples: tuple[Example, ...]
    questions: int
    short: int  # questions for which the data has too few contexts without the answer
    impossible: int  # questions that were to lose the answer, but no other context lacks it


def with_contexts(
    examples: Sequence[Example], count: int, *, negatives: float = 0.0, seed: int = 0
) -> MultiContextExamples:
    """Return every question with `count` contexts, or as many as there are.

    A question with one context gets those of the data that share most words with it (BM25) and do not contain its
    answer; all are ordered by rank. A question with several keeps `count` of them, those with an answer first. The
    contexts of question `q` have the ids `q#0`, `q#1` and so on. `negatives` is the share of the answerable questions
    that keep no context with an answer, so that "no answer" is right for some questions too; a question all of whose
    possible contexts contain the answer keeps it.

    >>> from lamella import load_examples
    >>> rows = [
    ...     {"id": "t", "question": "Who found Titan?", "context": "Huygens found Titan.", "answers": ["Huygens"]},
    ...     {"id": "r", "question": "Who found Rhea?", "context": "Cassini found Rhea.", "answers": ["Cassini"]},
    ... ]
    >>> for example in with_contexts(load_examples(rows).examples, 2).examples:
    ...     print(example.id, example.context.text)
    t#0 Huygens found Titan.
    t#1 Cassini found Rhea.
    r#0 Cassini found Rhea.
    r#1 Huygens found Titan.
    """
    questions, contexts, taken = group_questions(examples), NegativeContexts(examples), ids_of(examples)
    unanswered = draw_answerable(questions, negatives, seed)
    made: list[Example] = []
    short = impossible = 0
    with progress("finding contexts", len(questions)) as advance:
        for number, question in enumerate(questions):
            chosen = _contexts(question, count, contexts, answerable=number not in unanswered)
            if not chosen:
                impossible += 1
                chosen = _contexts(question, count, contexts, answerable=True)
            if not _has_several(question) and (used := [example.id for example in chosen if example.id in taken]):
                raise UsageError(f"multi-context: the id {shorten(used[0])} is that of another question; rename it.")
            short += len(chosen) < count
            made += chosen
            advance()
    return MultiContextExamples(tuple(made), len(questions), short, impossible)


def _has_several(question: Question) -> bool:
    return question.examples[0].group is not None


def _contexts(question: Question, count: int, contexts: NegativeContexts, *, answerable: bool) -> list[Example]:
    """Return a question with `count` contexts, or as many as there are; if not `answerable`, all without an answer."""
    if _has_several(question):
        return choose_contexts(
            [example for example in question.examples if answerable or not example.answerable], count
        )
    (own,) = question.examples
    ranked = (contexts.best_with_own if answerable else contexts.best)(question, count)
    return [
        replace(own, id=f"{question.id}#{place}", group=question.id)
        if context.text == own.context.text
        else Example(f"{question.id}#{place}", own.question, context, group=question.id)
        for place, context in enumerate(ranked)
    ]
