"""Diagnose misplaced answers, and repair or skip faulty examples.

Reading a file already repairs the faults in its structure (see formats.py); this module repairs the rest. An answer may
be moved or respelled, never replaced by a different one. An answer that is not in its context is dropped, and so is its
question if no other answer remains.
"""

from __future__ import annotations

import dataclasses
import hashlib
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from lamella.data.doctor.problems import Problem, quote
from lamella.data.examples import Answer, Example
from lamella.data.file_formats.formats import DataFile
from lamella.data.file_formats.question_parsing import occurrences
from lamella.errors import counted, shorten


class Fixed(NamedTuple):
    """The repaired examples, the number of fixed problems, and the problems that cost an answer or a question."""

    examples: tuple[Example, ...]
    fixed: int
    dropped: list[Problem]


class Diagnosis(NamedTuple):
    """The fault of an answer; `answer` is the corrected one, None if it cannot be corrected."""

    kind: str
    reason: str
    answer: Answer | None


def fix(file: DataFile, problems: Iterable[Problem]) -> Fixed:
    """Repair the examples of a file, given the problems that `check` found (problems of other files are ignored)."""
    problems = [problem for problem in problems if problem.file == file.path]
    kinds_of = _kinds_by_example(problems)
    first_question: dict[str | None, str] = {}
    examples: dict[str, Example] = {}
    lost: set[int] = set()
    for index, example in enumerate(file.examples):
        kinds = kinds_of[index]
        if kinds & {"duplicate_question", "question_in_two_files"}:
            continue  # the first copy is kept
        fixed = None if _is_unusable(example, kinds) else _fix_answers(example)
        if fixed is None:
            lost.add(index)
            continue
        question = first_question.setdefault(example.group, example.question)
        if kinds & {"duplicate_id", "id_in_two_files"}:
            fixed = _rename(fixed, with_group="id_in_two_files" in kinds or question != example.question)
        examples.setdefault(fixed.id, fixed)  # two examples that differed only in a fault are now equal
    count = sum(problem.fixable and problem.example not in lost for problem in problems)
    dropped = [problem for problem in problems if problem.severity == "error" and not problem.fixable]
    return Fixed(tuple(examples.values()), count, dropped)


def skip_faulty(file: DataFile, problems: Iterable[Problem]) -> tuple[Example, ...]:
    """Return the examples of a file without the questions that have an error, fixable or not."""
    errors = [problem for problem in problems if problem.file == file.path and problem.severity == "error"]
    faulty = {problem.example for problem in errors}
    named = {problem.id for problem in errors if problem.example is None}
    named |= {file.examples[index].group for index in faulty if index is not None}
    named.discard(None)
    return tuple(
        example
        for index, example in enumerate(file.examples)
        if not (index in faulty or example.id in named or example.group in named or _is_unusable(example, ()))
    )


def diagnose(answer: Answer, context: str) -> Diagnosis | None:
    """Find out why an answer is not at its offset, the most specific cause first; None if it is there."""
    if not answer.text.strip():
        return Diagnosis("empty_answer", f"the answer text {quote(answer.text)} is empty", None)
    if _is_at(answer.text, answer.begin_char, context):
        return None
    for diagnose_cause in (_other_units, _stripped_space, _other_spelling_here, _elsewhere, _other_spelling_elsewhere):
        diagnosis = diagnose_cause(answer, context)
        if diagnosis is not None:
            return diagnosis
    return Diagnosis("answer_not_in_context", f"answer {quote(answer.text)} does not occur in the context", None)


def _is_at(text: str, begin: int, context: str) -> bool:
    return begin >= 0 and context.startswith(text, begin)


def _other_units(answer: Answer, context: str) -> Diagnosis | None:
    """Detect offsets in other units: in `😀 Rome`, Rome is at 2, at 3 in UTF-16 units, at 5 in UTF-8 bytes."""
    if context.isascii() or answer.begin_char < 0:
        return None
    for kind, encoding, width, unit in (
        ("offset_in_utf16", "utf-16-le", 2, "UTF-16 units"),
        ("offset_in_utf8_bytes", "utf-8", 1, "UTF-8 bytes"),
    ):
        before = context.encode(encoding, "surrogatepass")[: width * answer.begin_char]
        begin = len(before.decode(encoding, "ignore"))
        if begin != answer.begin_char and _is_at(answer.text, begin, context):
            reason = (
                f"answer {quote(answer.text)} is at {begin}; {shorten(answer.begin_char)} counts {unit}, not characters"
            )
            return Diagnosis(kind, reason, Answer(answer.text, begin))
    return None


def _stripped_space(answer: Answer, context: str) -> Diagnosis | None:
    """Detect offsets and texts that disagree only about white space at an edge."""
    text, begin = answer.text, answer.begin_char
    shown, bare = quote(text), text.strip()
    leading = len(context) - len(context.lstrip())
    if leading and begin >= 0 and _is_at(text, begin + leading, context):
        spaces = counted(leading, "leading space")
        reason = f"answer {shown} is at {begin + leading}; {begin} ignores the {spaces} of the context"
        return Diagnosis("offset_without_leading_space", reason, Answer(text, begin + leading))
    for place in (begin, begin + len(text) - len(text.lstrip())):
        if bare != text and _is_at(bare, place, context):
            reason = f"answer {shown} has white space at its edge that the context does not have at {shorten(begin)}"
            return Diagnosis("answer_edge_space", reason, Answer(bare, place))
    behind = begin + len(context[begin:]) - len(context[begin:].lstrip()) if begin >= 0 else begin
    if behind != begin and _is_at(text, behind, context):
        reason = f"answer {shown} is at {behind}; {begin} is the white space before it"
        return Diagnosis("offset_before_space", reason, Answer(text, behind))
    return None


def _elsewhere(answer: Answer, context: str) -> Diagnosis | None:
    text, begin = answer.text, answer.begin_char
    places = list(occurrences(text, context))
    if not places:
        return None
    nearest = _nearest(places, begin)
    times = "the only occurrence" if len(places) == 1 else f"the nearest of {len(places)} occurrences"
    if not 0 <= begin < len(context):
        reason = f"answer_start {shorten(begin)} is outside the context of {counted(len(context), 'character')}; "
        reason += f"answer {quote(text)} is at {nearest} ({times})"
        return Diagnosis("answer_start_out_of_range", reason, Answer(text, nearest))
    reason = f"answer {quote(text)} is at {nearest}, not at {begin}: shifted by {begin - nearest:+d} ({times})"
    return Diagnosis("answer_shifted", reason, Answer(text, nearest))


def _other_spelling_here(answer: Answer, context: str) -> Diagnosis | None:
    if answer.begin_char < 0:
        return None
    # Long enough for a decomposed answer (a Korean syllable has up to three letters) or one with extra spaces.
    piece = context[answer.begin_char : answer.begin_char + 3 * len(answer.text) + 16]
    if dict(_LOOSEST.find(answer.text, piece)).get(0) is None:
        return None
    for spelling in (*_SPELLINGS, _LOOSEST):
        end = dict(spelling.find(answer.text, piece)).get(0)
        if end is not None:
            return _respell(spelling, answer, answer.begin_char, answer.begin_char + end, context)
    return None


def _other_spelling_elsewhere(answer: Answer, context: str) -> Diagnosis | None:
    for spelling in (*_SPELLINGS, _LOOSEST):
        places = dict(spelling.find(answer.text, context))
        if places:
            begin = _nearest(places, answer.begin_char)
            return _respell(spelling, answer, begin, places[begin], context)
    return None


def _respell(spelling: _Spelling, answer: Answer, begin: int, end: int, context: str) -> Diagnosis:
    text = context[begin:end]
    reason = f"answer {quote(answer.text)} differs in {spelling.what} from {quote(text)} at {begin}"
    if spelling.kind == "answer_unicode":
        reason = f"answer {quote(answer.text)} is {_form(answer.text)}, but {_form(text)} in the context at {begin}"
    if begin != answer.begin_char:
        reason += f" (not at {shorten(answer.begin_char)})"
    return Diagnosis(spelling.kind, reason, Answer(text, begin))


def _form(text: str) -> str:
    forms = [form for form in ("NFC", "NFD", "NFKC", "NFKD") if unicodedata.is_normalized(form, text)]
    return "/".join(forms) or "in no Unicode normal form"


class _Spelling(NamedTuple):
    """A difference in spelling, defined by a function that maps each character to a form without the difference."""

    kind: str
    what: str
    fold: Callable[[str], str]
    collapse: bool  # treat runs of spaces as one space

    def find(self, text: str, context: str) -> Iterator[tuple[int, int]]:
        """Yield the begin and end of each occurrence of a text in a context, ignoring the difference."""
        needle = "".join(character for character, _ in self._folded(text)).strip()
        folded = list(self._folded(context))
        haystack = "".join(character for character, _ in folded)
        owners = [owner for _, owner in folded]
        for place in occurrences(needle, haystack):
            last = place + len(needle) - 1
            # A match must not begin or end inside a character: `a` does not match `ä`, although its decomposition
            # is `a` + U+0308.
            if place > 0 and owners[place - 1] == owners[place]:
                continue
            if last + 1 < len(owners) and (owners[last + 1] == owners[last] or _joins_back(haystack[last + 1])):
                continue
            yield owners[place], owners[last] + 1

    def _folded(self, text: str) -> Iterator[tuple[str, int]]:
        """Yield the folded characters, each with the index of its original character."""
        previous = ""
        for index, character in enumerate(text):
            for piece in self.fold(character):
                if not (self.collapse and piece == previous == " "):
                    yield piece, index
                previous = piece


_INVISIBLE = frozenset("\u00ad\u200b\u200c\u200d\u2060\ufeff")


def _plain_space(character: str) -> str:
    return " " if character.isspace() else "" if character in _INVISIBLE else character


def _decomposed(character: str) -> str:
    return unicodedata.normalize("NFKD", character)


def _fold_all(character: str) -> str:
    return "".join(_plain_space(piece) for piece in _decomposed(_plain_space(character)).casefold())


_SPELLINGS = (
    _Spelling("answer_whitespace", "white space", _plain_space, collapse=True),
    _Spelling("answer_unicode", "Unicode form", _decomposed, collapse=False),
    _Spelling("answer_case", "case", str.casefold, collapse=False),
)
_LOOSEST = _Spelling("answer_spelling", "case, white space and Unicode form", _fold_all, collapse=True)


def _joins_back(character: str) -> bool:
    """Check whether a character belongs to the previous one: a combining mark, a Korean vowel or final consonant."""
    return unicodedata.combining(character) > 0 or "\u1160" <= character <= "\u11ff"


def _nearest(places: Iterable[int], begin: int) -> int:
    return min(places, key=lambda place: (abs(place - begin), place))


def _kinds_by_example(problems: Iterable[Problem]) -> defaultdict[int, set[str]]:
    kinds: defaultdict[int, set[str]] = defaultdict(set)
    for problem in problems:
        if problem.example is not None:
            kinds[problem.example].add(problem.kind)
    return kinds


def _is_unusable(example: Example, kinds: Collection[str]) -> bool:
    """Check whether a question must be dropped, whatever its answers are."""
    return "answerable_without_answers" in kinds or not example.question.strip() or not example.context.text.strip()


def _fix_answers(example: Example) -> Example | None:
    """Return the example with corrected answers; None if it loses its last answer."""
    text = example.context.text
    answers = tuple(_fix_each(example.answers, text))
    plausible = tuple(_fix_each(example.plausible_answers, text))
    if example.answers and not answers:
        return None
    if answers == example.answers and plausible == example.plausible_answers:
        return example
    return dataclasses.replace(example, answers=answers, plausible_answers=plausible)


def _fix_each(answers: tuple[Answer, ...], context: str) -> Iterator[Answer]:
    for answer in answers:
        diagnosis = diagnose(answer, context)
        fixed = answer if diagnosis is None else diagnosis.answer
        if fixed is not None:
            yield fixed


def _rename(example: Example, *, with_group: bool) -> Example:
    """Return the example with a new id, made from its text so that the same fix always gives the same id."""
    answers = "\0".join(f"{answer.begin_char} {answer.text}" for answer in example.answers)
    id = f"{example.id}-{_digest(example.question, example.context.text, answers)}"
    if example.group is None or not with_group:
        return dataclasses.replace(example, id=id)
    return dataclasses.replace(example, id=id, group=f"{example.group}-{_digest(example.question)}")


def _digest(*texts: str) -> str:
    return hashlib.sha1("\0".join(texts).encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:8]
