"""Parse one question with its answers, as the nested and the flat formats write it."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

from lamella.data.doctor.problems import quote
from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.source import Place, Source, describe, describe_absence
from lamella.errors import counted, truncate

Faults = list[tuple[str, str]]  # kind and reason of each fault of one question
ANSWER_FIELDS = ("answers", "answer", "answer_text")  # of a flat row; the first with a value is read


def read_question(qa: dict[str, Any], context: Context, place: Place, source: Source, *, flat: bool = False) -> None:
    """Add one question to the source. In the flat format, answers may be plain texts and may be absent."""
    question = source.require(qa, "question", str, "wrong_type_question", place)
    faults: Faults = []
    answers = _read_answers(qa, _answer_field(qa, flat), context.text, place, faults, plain=flat)
    if question is None or answers is None:
        source.add(None, faults, place)
        return
    answers = _check_answerability(qa, answers, place, faults, flat=flat)
    plausible_faults: Faults = []
    plausible = _read_answers(qa, "plausible_answers", context.text, place, plausible_faults, plain=flat)
    if plausible_faults:
        faults.append(("wrong_type_plausible_answers", plausible_faults[0][1]))
        plausible = []
    if answers and plausible:
        beside = f"{counted(len(plausible), 'plausible answer')} beside {counted(len(answers), 'answer')}"
        faults.append(("plausible_on_answerable", beside))
    example = Example(
        question_id(qa, faults, place, made_from=(question, context.text), expected=True),
        question,
        context,
        tuple(answers),
        tuple(plausible or ()),
        _read_group(qa, place, faults),
    )
    source.add(example, faults, place)


def occurrences(text: str, context: str) -> Iterator[int]:
    """Yield the positions of a text in a context, overlapping ones too."""
    place = context.find(text) if text else -1
    while place >= 0:
        yield place
        place = context.find(text, place + 1)


def question_name(qa: dict[str, Any], place: Place) -> str:
    """Return the name of a question in messages: its id, or its position if it has none."""
    id = qa.get("id")
    return str(id) if isinstance(id, str | int | float) and id != "" else place.path


def question_id(
    qa: dict[str, Any],
    faults: Faults,
    place: Place,
    *,
    made_from: tuple[str, ...],
    expected: bool = False,
) -> str:
    """Return the id of a question; if it has none, make one from its position and texts."""
    id = qa.get("id")
    if isinstance(id, int) and not isinstance(id, bool):
        return str(id)
    if isinstance(id, str) and id.strip():
        return id
    texts = "\0".join((place.path, *made_from)).encode("utf-8", "replace")
    made = hashlib.sha1(texts, usedforsecurity=False).hexdigest()[:24]
    if id is None or isinstance(id, str):
        if expected:
            faults.append(("missing_id", f"{place.path} has no id; using {made}"))
        return made
    faults.append(("wrong_type_id", f"{place.path}.id: expected text or an integer, got {describe(id)}"))
    return str(id) if isinstance(id, float) else made


def _check_answerability(
    qa: dict[str, Any], answers: list[Answer], place: Place, faults: Faults, *, flat: bool
) -> list[Answer]:
    """Compare the answers with `is_impossible`; return the answers to use."""
    impossible = qa.get("is_impossible")
    if not (impossible is None or isinstance(impossible, bool)):
        where = place.at("is_impossible").path
        faults.append(("wrong_type_is_impossible", f"{where}: expected true or false, got {describe(impossible)}"))
        return answers
    if answers and not any(answer.text for answer in answers):
        if impossible or (impossible is None and all(answer.begin_char == -1 for answer in answers)):
            faults.append(("empty_text_for_no_answer", "an empty answer text is used for no answer"))
            return []
    elif answers and impossible:
        texts = ", ".join(quote(text) for text in dict.fromkeys(answer.text for answer in answers))
        faults.append(("impossible_with_answers", f"is_impossible is true, but the answers are {texts}"))
    elif not answers and impossible is False:
        faults.append(("answerable_without_answers", "is_impossible is false, but there are no answers"))
    elif not answers and impossible is None and (not flat or qa.get(_answer_field(qa, flat)) is None):
        found = f" (found {truncate(', '.join(map(str, qa)), 80)})" if flat and not qa.keys() & {*ANSWER_FIELDS} else ""
        message = f"neither answers nor is_impossible is given{found}; treated as unanswerable"
        faults.append(("unlabelled", message))
    return answers


def _read_group(qa: dict[str, Any], place: Place, faults: Faults) -> str | None:
    """Return the id of the question about several contexts that this one is a part of, if any."""
    group = qa.get("group")
    if group is None or isinstance(group, str):
        return group
    faults.append(("wrong_type_group", f"{place.path}.group: expected text, got {describe(group)}"))
    return str(group) if isinstance(group, int | float) and not isinstance(group, bool) else None


def _answer_field(qa: dict[str, Any], flat: bool) -> str:
    """Return the name of the field with the answers; flat data has several names for it."""
    names = ANSWER_FIELDS if flat else ()
    return next((name for name in names if qa.get(name) is not None), "answers")


def _read_answers(
    qa: dict[str, Any], key: str, context: str, place: Place, faults: Faults, *, plain: bool
) -> list[Answer] | None:
    """Return the readable answers; None if there are entries and none of them is readable."""
    entries = _answer_entries(qa.get(key), place.at(key), faults, plain=plain)
    if entries is None:
        expected = "text or a list" if plain else "a list"
        faults.append(("wrong_type_answers", f"{place.at(key).path}: expected {expected}, got {describe(qa[key])}"))
        return None
    if plain and key in ANSWER_FIELDS and qa.get("answer_start") is not None:
        entries = _with_starts(entries, qa["answer_start"], place.at(key), faults)
    answers = []
    for number, entry in enumerate(entries):
        answer = _read_answer(entry, context, place.at(key, number), faults, plain=plain)
        if answer is not None:
            answers.append(answer)
    return answers if answers or not entries else None


def _answer_entries(value: Any, place: Place, faults: Faults, *, plain: bool) -> list[Any] | None:
    """Return the answers as a list with one entry each, whichever known notation is used."""
    if value is None or (plain and value == ""):
        return []
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
        if isinstance(texts, list) and (starts is None or isinstance(starts, list)):
            return _pairs(texts, starts or [], place, faults if plain else [])
        return [value] if value else []
    if isinstance(value, str) and plain:
        return [value]
    return value if isinstance(value, list) else None


def _with_starts(entries: list[Any], starts: Any, place: Place, faults: Faults) -> list[Any]:
    """Return plain answer texts with the offsets that the row has in a field of its own."""
    if not all(isinstance(entry, str) for entry in entries):
        return entries  # they have their own offsets
    if not isinstance(starts, list):
        starts = [starts]
    return _pairs(entries, starts[: len(entries)], place, faults)


def _pairs(texts: list[Any], starts: list[Any], place: Place, faults: Faults) -> list[Any]:
    """Return an entry for each text and its offset; fewer offsets than texts are a fault, no offsets are none."""
    if 0 < len(starts) < len(texts):
        reason = f"{place.path}: expected an answer_start for each of {len(texts)} texts, got {len(starts)}"
        faults.append(("missing_answer_start", reason))
    columns = itertools.zip_longest(texts, starts, fillvalue=_ABSENT)
    return [
        {name: value for name, value in (("text", text), ("answer_start", start)) if value is not _ABSENT}
        for text, start in columns
    ]


_ABSENT = object()


def _read_answer(entry: Any, context: str, place: Place, faults: Faults, *, plain: bool) -> Answer | None:
    if isinstance(entry, str) and plain:
        return _locate(entry, context, place, faults)
    if not isinstance(entry, dict):
        faults.append(("wrong_type_answer", f"{place.path}: expected an object, got {describe(entry)}"))
        return None
    text, start = entry.get("text"), entry.get("answer_start")
    if text is None:
        faults.append(("missing_field", f"{place.path}.text {describe_absence(entry, 'text')}"))
        return None
    if not isinstance(text, str):
        faults.append(("wrong_type_answer_text", f"{place.path}.text: expected text, got {describe(text)}"))
        return None
    if isinstance(start, int) and not isinstance(start, bool):
        return Answer(text, start)
    if start is None and plain:
        return _locate(text, context, place, faults)
    if start is None:
        absence = describe_absence(entry, "answer_start")
        faults.append(("missing_answer_start", f"{place.path}.answer_start {absence}"))
        return _first_occurrence(text, context)
    reason = f"{place.path}.answer_start: expected a whole number, got {describe(start)}"
    faults.append(("wrong_type_answer_start", reason))
    if isinstance(start, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", start):
        return Answer(text, int(start))
    if isinstance(start, float) and start.is_integer():
        return Answer(text, int(start))
    return _first_occurrence(text, context)


def _locate(text: str, context: str, place: Place, faults: Faults) -> Answer:
    """Place an answer without an offset where it occurs; several occurrences are a fault, since each may be meant."""
    times = sum(1 for _ in occurrences(text, context))
    if times > 1 and text.strip():
        reason = f"{place.path}: {quote(text)} occurs {times} times in the context; expected answer_start"
        faults.append(("missing_answer_start", reason))
    return _first_occurrence(text, context)


def _first_occurrence(text: str, context: str) -> Answer:
    """Place an answer at its first occurrence; one that does not occur goes to 0, where the checks report it."""
    return Answer(text, max(context.find(text), 0))
