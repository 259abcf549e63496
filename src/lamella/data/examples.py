"""Questions with their contexts and answers, independent of any file format.

Positions count characters (Unicode code points) of the context; ends are exclusive. A question without answers is
unanswerable: there is no flag, empty string or -1 that could contradict it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of the context: `context.text[begin_char:end_char] == text` in a valid file."""

    text: str
    begin_char: int

    @property
    def end_char(self) -> int:
        return self.begin_char + len(self.text)


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A paragraph. The examples of a paragraph share one object, so that its text is tokenised once."""

    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """One question about one context.

    `group` is the id of a question about several contexts (the multi-context task): the examples of a group are
    answered together. `plausible_answers` are the tempting wrong answers of SQuAD 2.0; nothing trains on them.
    """

    id: str
    question: str
    context: Context
    answers: tuple[Answer, ...] = ()
    plausible_answers: tuple[Answer, ...] = ()
    group: str | None = None

    @property
    def question_id(self) -> str:
        """The id of the question: the group, if the question is about several contexts."""
        return self.group or self.id

    @property
    def answerable(self) -> bool:
        return bool(self.answers)
