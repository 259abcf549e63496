"""What a question with its text and its answers is, once it is read from whatever file.

Positions are counted in characters (Unicode code points) of the context; an end is exclusive. A question without
answers is unanswerable: there is no flag, no empty string and no -1 that could contradict it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """A piece of the context: `context.text[begin_char:end_char] == text` in a sound file."""

    text: str
    begin_char: int

    @property
    def end_char(self) -> int:
        return self.begin_char + len(self.text)


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A paragraph. The examples of one paragraph share one object, so that its text is tokenised once."""

    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """One question about one context.

    `group` names the question when it is asked of several contexts (the open, multi-context task): the examples of a
    group are answered together. `plausible_answers` are SQuAD 2.0's tempting wrong ones; nothing trains on them.
    """

    id: str
    question: str
    context: Context
    answers: tuple[Answer, ...] = ()
    plausible_answers: tuple[Answer, ...] = ()
    group: str | None = None

    @property
    def question_id(self) -> str:
        """What names the question: its group, where it is asked of several contexts."""
        return self.group or self.id

    @property
    def answerable(self) -> bool:
        return bool(self.answers)
