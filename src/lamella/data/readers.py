"""Data files read into examples, whatever their format.

`read` looks at the content, never at the file's name: gzip or not, JSON, JSONL or CSV, then which reader recognises it.
Reading is tolerant: what can be read becomes an Example, each fault becomes a Problem with its place, and reading goes
on. Only a file that cannot be read at all raises.

A new format is one registered class with two methods: `likeness` says how many entries of a document look like its own
(the reader with the most reads the file), `read` puts examples and problems into the source.
"""

from __future__ import annotations

import ast
import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from lamella.data.examples import Answer, Context, Example
from lamella.data.problems import Problem, quote
from lamella.errors import UnreadableError
from lamella.registry import build, names, part, register

T = TypeVar("T", str, list[Any], dict[str, Any])


@dataclass(frozen=True)
class DataFile:
    """What was read from one file; `unread` counts the questions that could not be made into examples."""

    path: str
    format: str
    version: str | None
    examples: tuple[Example, ...]
    problems: tuple[Problem, ...]
    unread: int = 0


def read(path: str | Path) -> DataFile:
    """Read a data file of any known format; raises UnreadableError only when nothing of it can be read."""
    source = Source(str(path))
    document = _parse(_decode(_load(Path(path)), source.path), source)
    format = _recognise(document, source.path)
    build("reader", format).read(document, source)
    source.say_once_what_is_true_of_all("missing_id", "no question has an id; each got one of its own")
    source.say_once_what_is_true_of_all(
        "unlabelled", "no question has answers or is_impossible: fine to predict on, not to train or to score"
    )
    return DataFile(
        source.path, format, document.version, tuple(source.examples), tuple(source.problems), source.unread
    )


class Place(NamedTuple):
    """Where in a file something is, by its steps from the top and by the names people know it by."""

    steps: tuple[str | int, ...] = ()
    article: str | None = None
    id: str | None = None
    line: int | None = None

    @property
    def path(self) -> str:
        """The steps as in `data[3].paragraphs[0].qas[2]`."""
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.steps).removeprefix(".")

    def at(self, *steps: str | int) -> Place:
        return Place((*self.steps, *steps), self.article, self.id, self.line)


@dataclass(frozen=True)
class Document:
    """A parsed file, before it is known whose format it is."""

    content: Any
    container: Literal["json", "jsonl", "csv"] = "json"
    lines: Sequence[int] = ()  # of each entry, in JSONL and CSV

    @property
    def version(self) -> str | None:
        version = self.content.get("version") if isinstance(self.content, dict) else None
        return None if version is None or isinstance(version, list | dict) else str(version)

    @property
    def entries(self) -> list[Any]:
        """The articles or rows: the list under `data`, the list that the file is, or the one object that it is."""
        if isinstance(self.content, dict):
            data = self.content.get("data", [self.content])
            return data if isinstance(data, list) else []
        return self.content if isinstance(self.content, list) else []

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if isinstance(entry, dict)]

    def place(self, index: int) -> Place:
        if self.lines:
            return _line(self.lines[index])
        if isinstance(self.content, list):
            return Place((index,))
        return Place(("data", index)) if "data" in self.content else Place()


@dataclass
class Source:
    """The file being read: where its examples and its problems are put."""

    path: str
    examples: list[Example] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unread: int = 0
    contexts: dict[tuple[str, str], Context] = field(default_factory=dict)

    def report(
        self, kind: str, reason: str, place: Place, *, column: int | None = None, example: int | None = None
    ) -> None:
        self.problems.append(
            Problem(kind, self.path, reason, place.article, place.id, place.line, column, example=example)
        )

    def take(self, example: Example | None, faults: Sequence[tuple[str, str]], place: Place) -> None:
        """Keep an example with the faults of its question; None when the faults leave nothing of it."""
        for kind, reason in faults:
            self.report(kind, reason, place, example=None if example is None else len(self.examples))
        if example is None:
            self.unread += 1
        else:
            self.examples.append(example)

    def fetch(self, owner: dict[str, Any], key: str, type_: type[T], kind: str, place: Place) -> T | None:
        """A field that cannot be done without; None, and a problem, when it is absent or of another type."""
        value = owner.get(key)
        if isinstance(value, type_):
            return value
        where = place.at(key).path
        if value is None:
            self.report("missing_field", f"{where} is missing", place)
        else:
            self.report(kind, f"{where}: expected {_TYPE_NAMES[type_]}, found {_found(value)}", place)
        return None

    def title(self, owner: dict[str, Any], place: Place) -> str:
        """The title of an article, `""` when it has none."""
        title = owner.get("title")
        if title is None or isinstance(title, str):
            return title or ""
        self.report("wrong_type_title", f"{place.at('title').path}: expected text, found {_found(title)}", place)
        return str(title) if isinstance(title, int | float) else ""

    def share(self, text: str, title: str) -> Context:
        """One Context object for equal texts under equal titles, so that each is tokenised once."""
        return self.contexts.setdefault((title, text), Context(text, title))

    def say_once_what_is_true_of_all(self, kind: str, reason: str) -> None:
        """Replace as many problems of a kind as there are questions by one for the file."""
        if sum(problem.kind == kind for problem in self.problems) == len(self.examples) > 1:
            self.problems = [problem for problem in self.problems if problem.kind != kind]
            self.problems.append(Problem(kind, self.path, reason))


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
        for index, row in enumerate(document.entries):
            place = document.place(index)
            if not isinstance(row, dict):
                source.report("wrong_type_article", f"{place.path}: expected an object, found {_found(row)}", place)
                source.unread += 1
                continue
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
        for index, entry in enumerate(document.entries):
            place = document.place(index)
            if not isinstance(entry, dict):
                source.report("wrong_type_article", f"{place.path}: expected an object, found {_found(entry)}", place)
                source.unread += 1
                continue
            qa = source.fetch(entry, "qa", dict, "wrong_type_qa", place)
            if qa is not None:
                self._read_entry(entry, qa, place._replace(id=_name(qa, place.at("qa"))), source)
            else:
                source.unread += 1

    def _read_entry(self, entry: dict[str, Any], qa: dict[str, Any], place: Place, source: Source) -> None:
        question = source.fetch(qa, "question", str, "wrong_type_question", place.at("qa"))
        faults: list[tuple[str, str]] = []
        texts = self._answer_texts(qa.get("answer"), place, faults)
        paragraphs = source.fetch(entry, "paragraphs", list, "wrong_type_paragraphs", place)
        if question is None or texts is None or paragraphs is None:
            source.take(None, faults, place)
            return
        group = _id(qa, faults, place, made_from=(question, *texts))
        for number, paragraph in enumerate(paragraphs):
            here = place.at("paragraphs", number)
            if not isinstance(paragraph, dict):
                fault = f"{here.path}: expected an object, found {_found(paragraph)}"
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
        if not paragraphs:
            source.report("empty_article", f"{place.path}: no paragraphs", place)

    def _answer_texts(self, answer: Any, place: Place, faults: list[tuple[str, str]]) -> list[str] | None:
        """The texts that count as the answer; None when they cannot be made out."""
        where = place.at("qa", "answer").path
        if answer is None:
            faults.append(("unlabelled", f"{where} is missing; counts as unanswerable"))
            return []
        texts = answer if isinstance(answer, list) else [answer]
        for text in texts:
            if not isinstance(text, str):
                faults.append(("wrong_type_answers", f"{where}: expected text, found {_found(text)}"))
                return None
            if not text.strip():
                faults.append(("empty_answer", f"{where} is empty"))
                return None
        return list(dict.fromkeys(texts))


def _line(number: int) -> Place:
    return Place((f"line {number}",), line=number)


def _load(path: Path) -> bytes:
    """The bytes of a file, unpacked when they are gzip."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UnreadableError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise UnreadableError(f"{path}: expected a data file, found a folder.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UnreadableError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableError(f"{path}: a gzip file that is cut off or damaged ({error}).") from None


def _decode(data: bytes, path: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableError(f"{path}: expected UTF-8 text, found UTF-16; save it as UTF-8.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise UnreadableError(f"{path}: expected UTF-8 text; {found} is not.") from None
    if not text.strip():
        raise UnreadableError(f"{path}: is empty.")
    return text


def _parse(text: str, source: Source) -> Document:
    """The document in a text: JSON, else JSONL or CSV where it looks like one."""
    if text.lstrip()[:1] not in ("{", "["):
        document = _parse_csv(text, source)
        if document is not None:
            return document
    try:
        return Document(_parse_json(text, source, Place()))
    except json.JSONDecodeError as error:
        if _looks_like_lines(text):
            return _parse_lines(text, source)
        where = f"{source.path}:{error.lineno}:{error.colno}"
        raise UnreadableError(f"{where}: broken JSON: {error.msg}.") from None
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise UnreadableError(f"{source.path}: JSON that cannot be read ({error}).") from None


def _looks_like_lines(text: str) -> bool:
    """Whether most lines begin with a bracket, as in JSONL; of indented JSON only the first one does."""
    lines = [line for line in text.split("\n") if line.strip()]
    return len(lines) > 1 and 2 * sum(line.startswith(("{", "[")) for line in lines) > len(lines)


def _parse_lines(text: str, source: Source) -> Document:
    rows, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 may stand in a string
        if not line.strip():
            continue
        place = _line(number)
        try:
            rows.append(_parse_json(line, source, place))
            lines.append(number)
        except json.JSONDecodeError as error:
            source.report("broken_line", f"broken JSON: {error.msg}", place, column=error.colno)
            source.unread += 1
        except (RecursionError, ValueError) as error:
            source.report("broken_line", f"JSON that cannot be read ({error})", place)
            source.unread += 1
    return Document(rows, "jsonl", lines)


def _parse_csv(text: str, source: Source) -> Document | None:
    """The rows under a header with question and context; None when there is no such header."""
    header_line = text.lstrip("\r\n").partition("\n")[0]
    for delimiter in (",", "\t", ";"):
        header = [cell.strip().lower() for cell in next(csv.reader([header_line], delimiter=delimiter))]
        if "question" in header and "context" in header:
            break
    else:
        return None
    rows, lines = [], []
    cells = _csv_rows(text, delimiter)
    next(cells)
    for line, row in cells:
        if isinstance(row, list) and len(row) == len(header):
            rows.append(_typed_cells(dict(zip(header, row, strict=True)), source, line))
            lines.append(line)
            continue
        fault = row if isinstance(row, str) else f"{len(row)} cells, but the header has {len(header)}"
        source.report("broken_csv_row", fault, _line(line))
        source.unread += 1
    return Document(rows, "csv", lines)


def _csv_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """Each row that is not blank with the line it begins on; the fault in words where it cannot be taken apart."""
    limit = csv.field_size_limit(len(text) + 1)  # a context may be longer than the 128 KiB that csv allows
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        while True:
            line = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, f"broken quotes ({error})"
                continue
            if row:
                yield line, row
    finally:
        csv.field_size_limit(limit)


def _typed_cells(row: dict[str, str], source: Source, line: int) -> dict[str, Any]:
    """A CSV row as the JSON row that it stands for: an empty cell is an absent field."""
    typed: dict[str, Any] = {key: cell for key, cell in row.items() if cell.strip() or key in ("question", "context")}
    if "is_impossible" in typed:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        typed["is_impossible"] = words.get(typed["is_impossible"].strip().lower(), typed["is_impossible"])
    for key in ("answers", "plausible_answers"):
        typed[key] = _answers_cell(typed[key], source, _line(line)) if key in typed else []
    return typed


def _answers_cell(cell: str, source: Source, place: Place) -> Any:
    """The answers in a cell: JSON, a Python literal (what `Dataset.to_csv` writes), or a plain text."""
    if not cell.lstrip().startswith(("[", "{")):
        return cell
    try:
        return _parse_json(cell, source, place.at("answers"))
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(cell.strip()) if re.match(r"\s*\[?\{'", cell) else cell
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return cell


_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _RepeatedKeys(dict[str, Any]):
    """A JSON object that had keys twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.repeated = sorted({key for key in keys if keys.count(key) > 1})


class _NotANumber(NamedTuple):
    """NaN or an infinity, until it is reported."""

    spelling: str


def _parse_json(text: str, source: Source, place: Place) -> Any:
    """Parse JSON, and report what the parser would pass over: repeated keys, NaN, halves of surrogate pairs."""
    untidy = _SURROGATE_ESCAPE.search(text) is not None

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal untidy
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        untidy = True
        return _RepeatedKeys(pairs)

    def make_constant(spelling: str) -> _NotANumber:
        nonlocal untidy
        untidy = True
        return _NotANumber(spelling)

    value = json.loads(text, object_pairs_hook=make_object, parse_constant=make_constant)
    return _tidy(value, source, place) if untidy else value


def _tidy(value: Any, source: Source, place: Place) -> Any:
    """A copy of a JSON value without what no later step could handle, each such thing reported."""
    if isinstance(value, str):
        if not _SURROGATE.search(value):
            return value
        halves = ", ".join(sorted({f"\\u{ord(half):04x}" for half in _SURROGATE.findall(value)}))
        source.report("lone_surrogate", f"{place.path}: {halves} without its other half", place)
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, _NotANumber):
        source.report("not_a_number", f"{place.path}: {value.spelling} is not JSON", place)
        return None
    if isinstance(value, list):
        return [_tidy(item, source, place.at(index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        title, id = value.get("title"), value.get("id")
        if isinstance(title, str) and not _SURROGATE.search(title):
            place = place._replace(article=title)
        if isinstance(id, str) and not _SURROGATE.search(id):
            place = place._replace(id=id)
        if isinstance(value, _RepeatedKeys):
            repeated = ", ".join(quote(key) for key in value.repeated)
            source.report("duplicate_key", f"{place.path or 'the file'}: the key {repeated} is there twice", place)
        return {_SURROGATE.sub("\ufffd", key): _tidy(item, source, place.at(key)) for key, item in value.items()}
    return value


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
    return f"{_found(document.content)} without objects" if document.entries else _found(document.content)


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


def _read_nested(document: Document, source: Source) -> None:
    if isinstance(document.content, dict) and not isinstance(document.content.get("data", []), list):
        found = _found(document.content["data"])
        source.report("wrong_type_data", f"data: expected a list of articles, found {found}", Place(("data",)))
    for index, article in enumerate(document.entries):
        place = document.place(index)
        if not isinstance(article, dict):
            source.report("wrong_type_article", f"{place.path}: expected an object, found {_found(article)}", place)
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
        source.report("wrong_type_paragraph", f"{place.path}: expected an object, found {_found(paragraph)}", place)
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
            fault = f"{here.path}: expected an object, found {_found(qa)}"
            source.take(None, [("wrong_type_qa", fault)], here._replace(id=here.path))


def _read_question(qa: dict[str, Any], context: Context, place: Place, source: Source, *, flat: bool = False) -> None:
    """Put one question into the source; in the flat format, answers may be plain texts and may be absent."""
    question = source.fetch(qa, "question", str, "wrong_type_question", place)
    faults: list[tuple[str, str]] = []
    answers = _answers(qa, "answers", context.text, place, faults, plain=flat)
    if question is None or answers is None:
        source.take(None, faults, place)
        return
    answers = _agree_on_answerability(qa, answers, place, faults, flat=flat)
    doubts: list[tuple[str, str]] = []
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
    qa: dict[str, Any], answers: list[Answer], place: Place, faults: list[tuple[str, str]], *, flat: bool
) -> list[Answer]:
    """Compare the answers with `is_impossible`; returns those that count."""
    impossible = qa.get("is_impossible")
    if not (impossible is None or isinstance(impossible, bool)):
        where = place.at("is_impossible").path
        faults.append(("wrong_type_is_impossible", f"{where}: expected true or false, found {_found(impossible)}"))
        return answers
    if answers and not any(answer.text for answer in answers):
        if impossible or all(answer.begin_char == -1 for answer in answers):
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
    qa: dict[str, Any], key: str, context: str, place: Place, faults: list[tuple[str, str]], *, plain: bool
) -> list[Answer] | None:
    """The answers that can be read; None when there are some and none of them can."""
    entries = _answer_entries(qa.get(key), plain=plain)
    if entries is None:
        faults.append(("wrong_type_answers", f"{place.at(key).path}: expected a list, found {_found(qa[key])}"))
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


def _answer(entry: Any, context: str, place: Place, faults: list[tuple[str, str]], *, plain: bool) -> Answer | None:
    if isinstance(entry, str) and plain:
        return _first_occurrence(entry, context)
    if not isinstance(entry, dict):
        faults.append(("wrong_type_answer", f"{place.path}: expected an object, found {_found(entry)}"))
        return None
    text, start = entry.get("text"), entry.get("answer_start")
    if text is None:
        faults.append(("missing_field", f"{place.path}.text is missing"))
        return None
    if not isinstance(text, str):
        faults.append(("wrong_type_answer_text", f"{place.path}.text: expected text, found {_found(text)}"))
        return None
    if isinstance(start, int) and not isinstance(start, bool):
        return Answer(text, start)
    if start is None:
        faults.append(("missing_answer_start", f"{place.path}.answer_start is missing"))
        return _first_occurrence(text, context)
    found = f"{place.path}.answer_start: expected a whole number, found {_found(start)}"
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
    faults: list[tuple[str, str]],
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
    faults.append(("wrong_type_id", f"{place.path}.id: expected text, found {_found(id)}"))
    return str(id) if isinstance(id, int | float) and not isinstance(id, bool) else made


_TYPE_NAMES: dict[type, str] = {str: "text", list: "a list", dict: "an object"}


def _found(value: Any) -> str:
    """A value of the wrong type in words, short."""
    if isinstance(value, list | dict):
        return _TYPE_NAMES[type(value)] if value else f"an empty {'list' if isinstance(value, list) else 'object'}"
    if isinstance(value, str):
        return f"the text {quote(value)}"
    return json.dumps(value)
