"""Data files read into examples, whatever their format.

`read` looks at the content, never at the file's name. Reading is tolerant: what can be read becomes an Example, each
fault becomes a Problem with its place, and reading goes on. Only a file that cannot be read at all raises.

A new format is one registered class with two methods: `likeness` says how many entries of a document look like its own
(the reader with the most reads the file), `read` puts examples and problems into the source.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lamella.data.examples import Answer, Context, Example
from lamella.data.parsing import Document, Place, Source, describe, parse
from lamella.data.problems import Problem, quote
from lamella.errors import UnreadableError
from lamella.progress import progress
from lamella.registry import build, names, part, register

Faults = list[tuple[str, str]]  # kind and reason of each fault of one question


@dataclass(frozen=True)
class DataFile:
    """What was read from one file; `unread` counts the questions that could not be made into examples."""

    path: str
    format: str
    version: str | None
    examples: tuple[Example, ...]
    problems: tuple[Problem, ...]
    unread: int = 0
    size: int = 0  # in bytes, packed or not, as it was read
    sha256: str = ""


def read(path: str | Path) -> DataFile:
    """Read a data file of any known format (or `demo:train`); only one that cannot be read at all raises."""
    source = Source(str(path))
    with progress(f"reading {source.path}", None):
        document = parse(source)
        format = _recognise(document, source.path)
        reader: Reader = build("reader", format)
        reader.read(document, source)
    source.say_once_what_is_true_of_all("missing_id", "no question has an id; each got one of its own")
    source.say_once_what_is_true_of_all(
        "unlabelled", "no question has answers or is_impossible: fine to predict on, not to train or to score"
    )
    return DataFile(
        source.path,
        format,
        document.version,
        tuple(source.examples),
        tuple(source.problems),
        source.unread,
        source.size,
        source.sha256,
    )


class Reader(Protocol):
    """What is registered as a reader."""

    def likeness(self, document: Document) -> int: ...

    def read(self, document: Document, source: Source) -> None: ...


@register("reader", "squad")
class Squad:
    """Nested SQuAD 1.1 and 2.0: articles hold paragraphs, paragraphs hold questions."""

    def likeness(self, document: Document) -> int:
        return 0 if _is_korean(document) else _nested(document)

    def read(self, document: Document, source: Source) -> None:
        _read_nested(document, source)


@register("reader", "korquad")
class KorQuad:
    """KorQuAD 1.0: the shape of SQuAD 1.1 in Korean; known by its version string or its Hangul."""

    def likeness(self, document: Document) -> int:
        return _nested(document) if _is_korean(document) else 0

    def read(self, document: Document, source: Source) -> None:
        _read_nested(document, source)


@register("reader", "flat")
class Flat:
    """Rows of id, question, context, answers (and title, is_impossible): JSON list, JSONL or CSV.

    The answers of a row are `[{"text", "answer_start"}]`, `{"text": [...], "answer_start": [...]}` as in Hugging Face
    dumps, or plain texts, each of them taken at its first occurrence. No answers mean unanswerable.
    """

    def likeness(self, document: Document) -> int:
        if document.container == "csv":
            return 1
        return sum("question" in row and "context" in row for row in document.objects)

    def read(self, document: Document, source: Source) -> None:
        for row, place in _objects(document, source):
            title = source.title(row, place)
            place = place._replace(article=title or None, id=_name(row, place))
            text = source.fetch(row, "context", str, "wrong_type_context", place)
            if text is None:
                source.unread += 1
                continue
            _read_question(row, source.share(text, title), place, source, flat=True)


@register("reader", "multi_context")
class MultiContext:
    """The open format: a question with one answer text and several paragraphs, each paragraph an example.

    `{"data": [{"qa": {"id"?, "question", "answer"}, "paragraphs": [{"title", "contents"}]}]}`; a paragraph answers the
    question when the answer is in it, at its first occurrence. `answer` may be a list of texts.
    """

    def likeness(self, document: Document) -> int:
        return sum("qa" in entry for entry in document.objects)

    def read(self, document: Document, source: Source) -> None:
        for entry, place in _objects(document, source):
            qa = source.fetch(entry, "qa", dict, "wrong_type_qa", place)
            if qa is not None:
                self._read_entry(entry, qa, place._replace(id=_name(qa, place.at("qa"))), source)
            else:
                source.unread += 1

    def _read_entry(self, entry: dict[str, Any], qa: dict[str, Any], place: Place, source: Source) -> None:
        question = source.fetch(qa, "question", str, "wrong_type_question", place.at("qa"))
        faults: Faults = []
        texts = self._answer_texts(qa.get("answer"), place, faults)
        paragraphs = source.fetch(entry, "paragraphs", list, "wrong_type_paragraphs", place)
        if question is None or texts is None or paragraphs is None:
            source.take(None, faults, place)
            return
        group = _id(qa, faults, place, made_from=(question, *texts))
        for number, paragraph in enumerate(paragraphs):
            here = place.at("paragraphs", number)
            if not isinstance(paragraph, dict):
                fault = f"{here.path}: expected an object, found {describe(paragraph)}"
                source.take(None, [("wrong_type_paragraph", fault)], here)
                continue
            title = source.title(paragraph, here)
            here = here._replace(article=title or None)
            contents = source.fetch(paragraph, "contents", str, "wrong_type_context", here)
            if contents is None:
                source.unread += 1
                continue
            answers = tuple(Answer(text, contents.find(text)) for text in texts if text in contents)
            example = Example(f"{group}#{number}", question, source.share(contents, title), answers, group=group)
            source.take(example, faults, here)
            faults = []  # they are the question's: once is enough
        for kind, reason in faults:
            source.report(kind, reason, place)
        if not paragraphs:
            source.report("empty_article", f"{place.path}: no paragraphs", place)

    def _answer_texts(self, answer: Any, place: Place, faults: Faults) -> list[str] | None:
        """The texts that count as the answer; None when they cannot be made out."""
        where = place.at("qa", "answer").path
        if answer is None:
            faults.append(("unlabelled", f"{where} is missing; counts as unanswerable"))
            return []
        texts = answer if isinstance(answer, list) else [answer]
        for text in texts:
            if not isinstance(text, str):
                faults.append(("wrong_type_answers", f"{where}: expected text, found {describe(text)}"))
                return None
            if not text.strip():
                faults.append(("empty_answer", f"{where} is empty"))
                return None
        return list(dict.fromkeys(texts))


def _recognise(document: Document, path: str) -> str:
    """The name of the reader that knows most of the document's entries."""
    likeness = {name: build("reader", name).likeness(document) for name in names("reader")}
    best = max(likeness, key=lambda name: likeness[name])
    if likeness[best]:
        return best
    known = "; ".join(f"{name} ({part('reader', name).summary.partition(':')[0]})" for name in likeness)
    raise UnreadableError(f"{path}: no known format: found {_outline(document)}. Known formats: {known}.")


def _outline(document: Document) -> str:
    """What a document of no known format has, in a few words."""
    if document.objects:
        keys = list(dict.fromkeys(key for entry in document.objects[:100] for key in entry))
        within = "" if document.objects[0] is document.content else " in its entries"
        more = ", ..." if len(keys) > 12 else ""
        return f"the keys {', '.join(quote(key) for key in keys[:12])}{more}{within}" if keys else f"no keys{within}"
    return f"{describe(document.content)} without objects" if document.entries else describe(document.content)


def _nested(document: Document) -> int:
    """How many entries are articles with paragraphs; 1 for a file with `data` but nothing in it to tell by."""
    if not document.objects and isinstance(document.content, dict):
        return 1
    return sum("paragraphs" in entry and "qa" not in entry for entry in document.objects)


_HANGUL = re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")
_LETTER = re.compile(r"[^\W\d_]")


def _is_korean(document: Document) -> bool:
    """Whether the version says KorQuAD, or a third of the letters of its first contexts are Hangul."""
    if "korquad" in (document.version or "").lower():
        return True
    paragraphs = (
        paragraph
        for article in document.objects
        if isinstance(article.get("paragraphs"), list)
        for paragraph in article["paragraphs"]
        if isinstance(paragraph, dict) and isinstance(paragraph.get("context"), str)
    )
    sample = "".join(paragraph["context"] for paragraph in itertools.islice(paragraphs, 20))
    return 3 * len(_HANGUL.findall(sample)) > len(_LETTER.findall(sample))


def _objects(document: Document, source: Source) -> Iterator[tuple[dict[str, Any], Place]]:
    """The entries that are objects, each with its place; any other is a question that could not be read."""
    for index, entry in enumerate(document.entries):
        place = document.place(index)
        if isinstance(entry, dict):
            yield entry, place
        else:
            source.report("wrong_type_article", f"{place.path}: expected an object, found {describe(entry)}", place)
            source.unread += 1


def _read_nested(document: Document, source: Source) -> None:
    if isinstance(document.content, dict) and not isinstance(document.content.get("data", []), list):
        found = describe(document.content["data"])
        source.report("wrong_type_data", f"data: expected a list of articles, found {found}", Place(("data",)))
    for index, article in enumerate(document.entries):
        place = document.place(index)
        if not isinstance(article, dict):
            source.report("wrong_type_article", f"{place.path}: expected an object, found {describe(article)}", place)
            continue
        title = source.title(article, place)
        place = place._replace(article=title or place.path or None)
        paragraphs = source.fetch(article, "paragraphs", list, "wrong_type_paragraphs", place)
        if paragraphs == []:
            source.report("empty_article", f"{place.path}: no paragraphs", place)
        for number, paragraph in enumerate(paragraphs or []):
            _read_paragraph(paragraph, title, place.at("paragraphs", number), source)


def _read_paragraph(paragraph: Any, title: str, place: Place, source: Source) -> None:
    if not isinstance(paragraph, dict):
        source.report("wrong_type_paragraph", f"{place.path}: expected an object, found {describe(paragraph)}", place)
        return
    text = source.fetch(paragraph, "context", str, "wrong_type_context", place)
    qas = source.fetch(paragraph, "qas", list, "wrong_type_qas", place)
    if qas == []:
        source.report("empty_paragraph", f"{place.path}: no questions", place)
    if qas is None or text is None:
        source.unread += len(qas or [])
        return
    context = Context(text, title)
    for number, qa in enumerate(qas):
        here = place.at("qas", number)
        if isinstance(qa, dict):
            _read_question(qa, context, here._replace(id=_name(qa, here)), source)
        else:
            fault = f"{here.path}: expected an object, found {describe(qa)}"
            source.take(None, [("wrong_type_qa", fault)], here._replace(id=here.path))


def _read_question(qa: dict[str, Any], context: Context, place: Place, source: Source, *, flat: bool = False) -> None:
    """Put one question into the source; in the flat format, answers may be plain texts and may be absent."""
    question = source.fetch(qa, "question", str, "wrong_type_question", place)
    faults: Faults = []
    answers = _answers(qa, "answers", context.text, place, faults, plain=flat)
    if question is None or answers is None:
        source.take(None, faults, place)
        return
    answers = _agree_on_answerability(qa, answers, place, faults, flat=flat)
    doubts: Faults = []
    plausible = _answers(qa, "plausible_answers", context.text, place, doubts, plain=flat)
    if doubts:
        faults.append(("wrong_type_plausible_answers", doubts[0][1]))
        plausible = []
    if answers and plausible:
        faults.append(("plausible_on_answerable", f"{len(plausible)} plausible answers beside {len(answers)} answers"))
    group = qa.get("group")
    example = Example(
        _id(qa, faults, place, made_from=(question, context.text), expected=True),
        question,
        context,
        tuple(answers),
        tuple(plausible or ()),
        group if isinstance(group, str) else None,
    )
    source.take(example, faults, place)


def _agree_on_answerability(
    qa: dict[str, Any], answers: list[Answer], place: Place, faults: Faults, *, flat: bool
) -> list[Answer]:
    """Compare the answers with `is_impossible`; returns those that count."""
    impossible = qa.get("is_impossible")
    if not (impossible is None or isinstance(impossible, bool)):
        where = place.at("is_impossible").path
        faults.append(("wrong_type_is_impossible", f"{where}: expected true or false, found {describe(impossible)}"))
        return answers
    if answers and not any(answer.text for answer in answers):
        if impossible or (impossible is None and all(answer.begin_char == -1 for answer in answers)):
            faults.append(("empty_text_for_no_answer", "an empty answer text stands for no answer"))
            return []
    elif answers and impossible:
        texts = ", ".join(quote(text) for text in dict.fromkeys(answer.text for answer in answers))
        faults.append(("impossible_with_answers", f"is_impossible is true, yet the answers are {texts}"))
    elif not answers and impossible is False:
        faults.append(("answerable_without_answers", "is_impossible is false, yet there are no answers"))
    elif not answers and impossible is None and (not flat or qa.get("answers") is None):
        faults.append(("unlabelled", "neither answers nor is_impossible; counts as unanswerable"))
    return answers


def _answers(
    qa: dict[str, Any], key: str, context: str, place: Place, faults: Faults, *, plain: bool
) -> list[Answer] | None:
    """The answers that can be read; None when there are some and none of them can."""
    entries = _answer_entries(qa.get(key), plain=plain)
    if entries is None:
        faults.append(("wrong_type_answers", f"{place.at(key).path}: expected a list, found {describe(qa[key])}"))
        return None
    answers = []
    for number, entry in enumerate(entries):
        answer = _answer(entry, context, place.at(key, number), faults, plain=plain)
        if answer is not None:
            answers.append(answer)
    return answers if answers or not entries else None


def _answer_entries(value: Any, *, plain: bool) -> list[Any] | None:
    """Answers as a list of one entry each, whichever of the known ways they are written in."""
    if value is None or (plain and value == ""):
        return []
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
        if isinstance(texts, list) and (starts is None or isinstance(starts, list)):
            columns = itertools.zip_longest(texts, starts or [])
            return [{"text": text, "answer_start": start} for text, start in columns]
        return [value] if value else []
    if isinstance(value, str) and plain:
        return [value]
    return value if isinstance(value, list) else None


def _answer(entry: Any, context: str, place: Place, faults: Faults, *, plain: bool) -> Answer | None:
    if isinstance(entry, str) and plain:
        return _first_occurrence(entry, context)
    if not isinstance(entry, dict):
        faults.append(("wrong_type_answer", f"{place.path}: expected an object, found {describe(entry)}"))
        return None
    text, start = entry.get("text"), entry.get("answer_start")
    if text is None:
        faults.append(("missing_field", f"{place.path}.text is missing"))
        return None
    if not isinstance(text, str):
        faults.append(("wrong_type_answer_text", f"{place.path}.text: expected text, found {describe(text)}"))
        return None
    if isinstance(start, int) and not isinstance(start, bool):
        return Answer(text, start)
    if start is None:
        faults.append(("missing_answer_start", f"{place.path}.answer_start is missing"))
        return _first_occurrence(text, context)
    found = f"{place.path}.answer_start: expected a whole number, found {describe(start)}"
    faults.append(("wrong_type_answer_start", found))
    if isinstance(start, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", start):
        return Answer(text, int(start))
    if isinstance(start, float) and start.is_integer():
        return Answer(text, int(start))
    return _first_occurrence(text, context)


def _first_occurrence(text: str, context: str) -> Answer:
    """An answer that does not say where it is; one that is not there goes to 0, where the doctor will miss it."""
    return Answer(text, max(context.find(text), 0))


def _name(qa: dict[str, Any], place: Place) -> str:
    """What messages call a question: its id, else its place."""
    id = qa.get("id")
    return str(id) if isinstance(id, str | int | float) and id != "" else place.path


def _id(
    qa: dict[str, Any],
    faults: Faults,
    place: Place,
    *,
    made_from: tuple[str, ...],
    expected: bool = False,
) -> str:
    """The id of a question; one made from its place and texts where it has none."""
    id = qa.get("id")
    if isinstance(id, str) and id.strip():
        return id
    made = hashlib.sha1("\0".join((place.path, *made_from)).encode("utf-8", "replace")).hexdigest()[:24]
    if id is None or isinstance(id, str):
        if expected:
            faults.append(("missing_id", f"{place.path} has no id; it got {made}"))
        return made
    faults.append(("wrong_type_id", f"{place.path}.id: expected text, found {describe(id)}"))
    return str(id) if isinstance(id, int | float) and not isinstance(id, bool) else made
