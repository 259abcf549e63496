"""Read a data file of any known format into examples.

`read` recognises the format by the content of the file, never by its name. Reading is tolerant: whatever is readable
becomes an Example, each fault becomes a Problem with its position, and reading continues. Only a file that cannot be
read at all raises an error.

A new format is one registered class with two methods: `likeness` counts the entries of a document that look like this
format (the format with the highest count reads the file), `read` adds examples and problems to the source.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from lamella.data.doctor.problems import Problem, quote
from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.in_memory import parse_records
from lamella.data.file_formats.parsing import parse
from lamella.data.file_formats.question_parsing import Faults, question_id, question_name, read_question
from lamella.data.file_formats.source import Document, Place, Source, describe, describe_absence
from lamella.errors import UnreadableError
from lamella.languages import detect_language
from lamella.progress import progress
from lamella.registry import build, names, part, register


@dataclass(frozen=True)
class DataFile:
    """The content of one file; `unread` counts the questions that could not be turned into examples.

    An article or a paragraph whose questions cannot be counted adds one.
    """

    path: str
    format: str
    version: str | None
    examples: tuple[Example, ...]
    problems: tuple[Problem, ...]
    unread: int = 0
    size: int = 0  # of the file in bytes, compressed if it is
    sha256: str = ""


def read(path: str | os.PathLike[str], *, encoding: str | None = None) -> DataFile:
    """Read a data file of any known format, or bundled data such as `demo:train`.

    Text is UTF-8, or UTF-16 with a byte order mark, unless `encoding` names another encoding.
    """
    source = Source(str(path))
    with progress(f"reading {source.path}", None):
        return _read_document(parse(source, encoding), source)


def read_records(records: Any, name: str) -> DataFile:
    """Read data in memory as if it were a file: the same formats, problems and counts, under the given name."""
    source = Source(name)
    with progress(f"reading {name}", None):
        return _read_document(parse_records(records, source), source)


def _read_document(document: Document, source: Source) -> DataFile:
    name = _recognise(document, source.path)
    format: Format = build("format", name)
    format.read(document, source)
    source.collapse_file_wide_problems("missing_id", "no question has an id; each gets a generated one")
    source.collapse_file_wide_problems(
        "unlabelled", "no question has answers or is_impossible; usable for predictions, not for training or scoring"
    )
    return DataFile(
        source.path,
        name,
        document.version,
        tuple(source.examples),
        tuple(source.problems),
        source.unread,
        source.size,
        source.sha256,
    )


class Format(Protocol):
    """The interface of a registered format."""

    def likeness(self, document: Document) -> int: ...

    def read(self, document: Document, source: Source) -> None: ...


@register("format", "squad")
class Squad:
    """Nested SQuAD 1.1 and 2.0: articles hold paragraphs, paragraphs hold questions."""

    def likeness(self, document: Document) -> int:
        return 0 if _is_korean(document) else _count_articles(document)

    def read(self, document: Document, source: Source) -> None:
        _read_nested(document, source)


@register("format", "korquad")
class KorQuad:
    """KorQuAD 1.0: the structure of SQuAD 1.1 in Korean; recognised by its version string or its Hangul."""

    def likeness(self, document: Document) -> int:
        return _count_articles(document) if _is_korean(document) else 0

    def read(self, document: Document, source: Source) -> None:
        _read_nested(document, source)


@register("format", "flat")
class Flat:
    """Flat rows of id, question, context, answers, title, is_impossible: JSON list, JSONL or CSV.

    The answers of a row are `[{"text", "answer_start"}]`, `{"text": [...], "answer_start": [...]}` as in Hugging Face
    data sets, or plain texts. Their field may also be called `answer` or `answer_text`, with `answer_start` beside it.
    A text without `answer_start` is located if the context contains it once. No answers mean unanswerable.
    """

    def likeness(self, document: Document) -> int:
        if document.container == "csv":
            return 1
        return sum("question" in row and "context" in row for row in document.objects)

    def read(self, document: Document, source: Source) -> None:
        for row, place in _objects(document, source):
            title = source.title(row, place)
            place = place._replace(article=title or None, id=question_name(row, place))
            text = source.require(row, "context", str, "wrong_type_context", place)
            if text is None:
                source.unread += 1
                continue
            read_question(row, source.context(text, title), place, source, flat=True)


@register("format", "multi_context")
class MultiContext:
    """The multi-context format: a question with one answer text and several paragraphs, each paragraph an example.

    `{"data": [{"qa": {"id"?, "question", "answer"}, "paragraphs": [{"title", "contents"}]}]}`; a paragraph answers the
    question if it contains the answer, which is placed at its first occurrence. `answer` may be a list of texts.
    """

    def likeness(self, document: Document) -> int:
        return sum("qa" in entry for entry in document.objects)

    def read(self, document: Document, source: Source) -> None:
        for entry, place in _objects(document, source):
            qa = source.require(entry, "qa", dict, "wrong_type_qa", place)
            if qa is not None:
                self._read_entry(entry, qa, place._replace(id=question_name(qa, place.at("qa"))), source)
            else:
                source.unread += 1

    def _read_entry(self, entry: dict[str, Any], qa: dict[str, Any], place: Place, source: Source) -> None:
        question = source.require(qa, "question", str, "wrong_type_question", place.at("qa"))
        faults: Faults = []
        texts = self._answer_texts(qa, place, faults)
        paragraphs = source.require(entry, "paragraphs", list, "wrong_type_paragraphs", place)
        if question is None or texts is None or paragraphs is None:
            source.add(None, faults, place)
            return
        group = question_id(qa, faults, place, made_from=(question, *texts))
        for number, paragraph in enumerate(paragraphs):
            paragraph_place = place.at("paragraphs", number)
            if not isinstance(paragraph, dict):
                fault = f"{paragraph_place.path}: expected an object, got {describe(paragraph)}"
                source.add(None, [("wrong_type_paragraph", fault)], paragraph_place)
                continue
            title = source.title(paragraph, paragraph_place)
            paragraph_place = paragraph_place._replace(article=title or None)
            contents = source.require(paragraph, "contents", str, "wrong_type_context", paragraph_place)
            if contents is None:
                source.unread += 1
                continue
            answers = tuple(Answer(text, contents.find(text)) for text in texts if text in contents)
            example = Example(f"{group}#{number}", question, source.context(contents, title), answers, group=group)
            source.add(example, faults, paragraph_place)
            faults = []  # they belong to the question, so report them once
        for kind, reason in faults:
            source.report(kind, reason, place)
        if not paragraphs:
            source.report("empty_article", f"{place.path}: no paragraphs", place)

    def _answer_texts(self, qa: dict[str, Any], place: Place, faults: Faults) -> list[str] | None:
        """Return the accepted answer texts; None if they cannot be read."""
        answer, where = qa.get("answer"), place.at("qa", "answer").path
        if answer is None:
            faults.append(("unlabelled", f"{where} {describe_absence(qa, 'answer')}; treated as unanswerable"))
            return []
        texts = answer if isinstance(answer, list) else [answer]
        for text in texts:
            if not isinstance(text, str):
                faults.append(("wrong_type_answers", f"{where}: expected text, got {describe(text)}"))
                return None
            if not text.strip():
                faults.append(("empty_answer", f"{where} is empty"))
                return None
        return list(dict.fromkeys(texts))


def _recognise(document: Document, path: str) -> str:
    """Return the name of the format that matches most of the document's entries."""
    likeness = {name: build("format", name).likeness(document) for name in names("format")}
    best = max(likeness, key=lambda name: likeness[name])
    if likeness[best]:
        return best
    known = "; ".join(f"{name} ({part('format', name).summary.partition(':')[0]})" for name in likeness)
    raise UnreadableError(f"{path}: unknown format: got {_outline(document)}; expected one of: {known}.")


def _outline(document: Document) -> str:
    """Describe the content of a document of unknown format in a few words."""
    if document.objects:
        keys = list(dict.fromkeys(key for entry in document.objects[:100] for key in entry))
        within = "" if document.objects[0] is document.content else " in its entries"
        more = ", ..." if len(keys) > 12 else ""
        return f"the keys {', '.join(quote(key) for key in keys[:12])}{more}{within}" if keys else f"no keys{within}"
    return f"{describe(document.content)} without objects" if document.entries else describe(document.content)


def _count_articles(document: Document) -> int:
    """Count the entries that are articles with paragraphs; 1 for a file whose `data` is empty."""
    if not document.objects and isinstance(document.content, dict):
        return 1
    return sum("paragraphs" in entry and "qa" not in entry for entry in document.objects)


def _is_korean(document: Document) -> bool:
    """Check whether the version names KorQuAD, or the first contexts are in Korean."""
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
    return detect_language(sample) == "ko"


def _objects(document: Document, source: Source) -> Iterator[tuple[dict[str, Any], Place]]:
    """Yield the entries that are objects with their positions; any other entry is reported as an unread question."""
    for index, entry in enumerate(document.entries):
        place = document.place(index)
        if isinstance(entry, dict):
            yield entry, place
        else:
            source.report("wrong_type_article", f"{place.path}: expected an object, got {describe(entry)}", place)
            source.unread += 1


def _read_nested(document: Document, source: Source) -> None:
    if isinstance(document.content, dict) and not isinstance(document.content.get("data", []), list):
        value = describe(document.content["data"])
        source.report("wrong_type_data", f"data: expected a list of articles, got {value}", Place(("data",)))
    for index, article in enumerate(document.entries):
        place = document.place(index)
        if not isinstance(article, dict):
            source.report("wrong_type_article", f"{place.path}: expected an object, got {describe(article)}", place)
            source.unread += 1
            continue
        title = source.title(article, place)
        place = place._replace(article=title or place.path or None)
        paragraphs = source.require(article, "paragraphs", list, "wrong_type_paragraphs", place)
        if paragraphs is None:
            source.unread += 1
        elif not paragraphs:
            source.report("empty_article", f"{place.path}: no paragraphs", place)
        for number, paragraph in enumerate(paragraphs or []):
            _read_paragraph(paragraph, title, place.at("paragraphs", number), source)


def _read_paragraph(paragraph: Any, title: str, place: Place, source: Source) -> None:
    if not isinstance(paragraph, dict):
        source.report("wrong_type_paragraph", f"{place.path}: expected an object, got {describe(paragraph)}", place)
        source.unread += 1
        return
    text = source.require(paragraph, "context", str, "wrong_type_context", place)
    qas = source.require(paragraph, "qas", list, "wrong_type_qas", place)
    if qas == []:
        source.report("empty_paragraph", f"{place.path}: no questions", place)
    if qas is None or text is None:
        source.unread += 1 if qas is None else len(qas)
        return
    context = Context(text, title)
    for number, qa in enumerate(qas):
        qa_place = place.at("qas", number)
        if isinstance(qa, dict):
            read_question(qa, context, qa_place._replace(id=question_name(qa, qa_place)), source)
        else:
            fault = f"{qa_place.path}: expected an object, got {describe(qa)}"
            source.add(None, [("wrong_type_qa", fault)], qa_place._replace(id=qa_place.path))
