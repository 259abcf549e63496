"""The command that asks: one question, the questions of a file, or questions typed at a prompt."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamella.cli.app import AsJson, DocumentEncoding, HowEager, Precision, app

if TYPE_CHECKING:
    from lamella.documents.collection import Documents
    from lamella.inference.answer_list import Answer, Answers
    from lamella.inference.reader import Reader

LAYERS_SHOWN = 4  # of the layers that an answer was read from, those with the largest weights
LONGEST_ECHO = 60  # characters of a wrong value that an error message repeats
LONGEST_ANSWER = 400  # characters of an answer that are printed; --json has all of them
QUESTIONS_AT_ONCE = 16  # of a file; more are not answered faster on a CPU, and an interrupt loses the answers to these


@app.command()
def ask(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION", help="The question; without it, a prompt asks for questions."),
    ] = None,
    folder: Annotated[
        list[str] | None,
        typer.Option(
            "--in",
            metavar="DIR|FILE...",
            help="Search these documents: folders, txt, md, html, pdf and docx files (also .gz), glob patterns.",
        ),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            "--context", "-c", metavar="FILE", help="A text or HTML file to read; -: standard input. Repeatable."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", "-t", metavar="TEXT", help="The text itself, instead of a file. Repeatable."),
    ] = None,
    questions: Annotated[
        str | None,
        typer.Option("--questions", metavar="FILE", help="A file with one question per line; -: standard input."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A model folder, a run folder with a model, or a transformers checkpoint; default: the reader that "
            "comes with the package.",
        ),
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Number of answers to show.")] = 1,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", help='Answer "no answer" above these null odds; default: the model\'s.'),
    ] = None,
    how_eager: HowEager = None,
    max_answer_length: Annotated[
        int | None, typer.Option("--max-answer-length", min=1, help="Maximum tokens per answer; default: the model's.")
    ] = None,
    passages: Annotated[
        str,
        typer.Option(
            "--passages",
            metavar="N",
            help="Read the N best passages; auto: 20 of documents, 50 of long texts; all: read everything.",
        ),
    ] = "auto",
    precision: Precision = "auto",
    layers: Annotated[
        bool, typer.Option("--layers", help="Show which layers of the encoder each answer was read from; needs torch.")
    ] = False,
    encoding: DocumentEncoding = None,
    as_json: AsJson = False,
) -> None:
    """Ask questions about texts, or about a folder of documents."""
    from lamella.errors import MissingLibraryError, UsageError
    from lamella.inference.abstention import PRIORS

    files, given = context or [], text or []
    question, sources = _split_words(words or [], folder or [])
    if question is not None and questions is not None:
        raise UsageError("ask: expected QUESTION or --questions, got both; choose one.")
    if question is not None and not question.strip():
        raise UsageError("ask: expected a question, got an empty text.")
    if sources and (files or given):
        raise UsageError("ask: expected --in, or --context and --text, got both; choose one.")
    if not files and not given and not sources:
        raise UsageError(
            "ask: expected a text to read; give --in DIR, --context FILE (- for standard input) or --text TEXT."
        )
    from_stdin = files.count("-") + (questions == "-" or (question is None and questions is None))
    if from_stdin > 1:
        raise UsageError(
            "ask: standard input can be read only once, for one --context or for the questions; give the others as "
            "files (--context FILE, --questions FILE)."
        )
    options = {
        "top_k": top_k,
        "threshold": threshold,
        "answerable": None if how_eager is None else PRIORS[how_eager],
        "max_answer_length": max_answer_length,
        "passages": _parse_passages(passages),
        "layers": layers,
    }
    texts = [*(_read_text(file, encoding, "--context") for file in files), *given]
    if not sources and not any(map(str.strip, texts)):
        blank = ", ".join([*files, *(["--text"] if given else [])])
        raise UsageError(f"ask: expected a text to read, found only white space in {blank}.")
    listed = None if questions is None else _read_questions(questions, encoding)

    from lamella.documents.collection import Documents
    from lamella.encoder.sources import DEFAULT_READER, READERS
    from lamella.inference.reader import Reader
    from lamella.models.loading import load_model

    if layers and importlib.util.find_spec("torch") is None:
        raise MissingLibraryError("ask --layers", ["torch"])
    names = [*files, *(f"text {number}" for number in range(1, len(given) + 1))]
    documents = Documents(*sources, encoding=encoding) if sources else None
    loaded = load_model(
        READERS / DEFAULT_READER if model is None else model,
        precision=precision,
        backend="torch" if layers else "auto",
        inference_only=True,
        few_questions=True,
    )
    session = _Session(Reader(loaded), documents or texts, names, options, as_json)
    if question is not None:
        session.ask([question], name_questions=False)
    elif listed is not None:
        session.ask_all(listed)
    else:
        typed = sys.stdin.isatty()
        session.ask_each(_prompt() if typed else _piped(), name_questions=not typed)


class _Session:
    """A reader with the texts to ask it about."""

    def __init__(
        self,
        reader: Reader,
        texts: Sequence[str] | Documents,
        names: Sequence[str],
        options: dict[str, Any],
        as_json: bool,
    ) -> None:
        self.reader, self.texts, self.names, self.options, self.as_json = reader, texts, names, options, as_json
        self.several = isinstance(texts, list) and len(texts) > 1
        self.logged: set[str] = set()

    def ask_all(self, questions: Sequence[str]) -> None:
        """Answer questions a few at a time, and print their answers at once: an interrupt must not lose them."""
        from lamella.progress import progress

        # Where answers appear on the terminal, they are the progress, and a bar would be in their way.
        shows = sys.stdout.isatty()
        with contextlib.nullcontext(None) if shows else progress("answering", len(questions), lines=True) as advance:
            for begin in range(0, len(questions), QUESTIONS_AT_ONCE):
                part = questions[begin : begin + QUESTIONS_AT_ONCE]
                if begin and not self.as_json:
                    typer.echo()
                self.ask(part)
                sys.stdout.flush()
                if advance is not None:
                    advance(len(part))

    def ask_each(self, questions: Iterator[str], *, name_questions: bool) -> None:
        """Answer each question as soon as it comes."""
        from lamella.errors import LamellaError, for_terminal

        for number, question in enumerate(questions):
            if number and name_questions and not self.as_json:
                typer.echo()
            try:
                self.ask([question], name_questions=name_questions or self.as_json)
            except LamellaError as error:
                typer.echo(f"lamella: {for_terminal(str(error))}", err=True)
            sys.stdout.flush()

    def ask(self, questions: Sequence[str], *, name_questions: bool = True) -> None:
        """Answer questions and print the answers."""
        context = self.texts if self.several or not isinstance(self.texts, list) else self.texts[0]
        results = self.reader.ask(questions, [context] * len(questions), **self.options, log=self._log)
        for number, (question, answers) in enumerate(zip(questions, results, strict=True)):
            if self.several:
                for answer in [*answers, *filter(None, [answers.best_guess])]:
                    answer["file"] = self.names[answer["context"]] if answer["answer"] else None
            if self.as_json:
                record = ({"question": question} if name_questions else {}) | answers.to_json()
                typer.echo(json.dumps(record, ensure_ascii=False))
                continue
            if name_questions:
                typer.echo(f"{chr(10) if number else ''}{question}")
            self._print(answers)

    def _print(self, answers: Answers) -> None:
        from lamella.errors import counted

        for answer in answers:
            if answer["answer"]:
                self._print_answer(answer)
                continue
            place = f"not in the text{'s' if self.several else ''}"
            if answers.passages is not None:
                place = f"not in the {counted(answers.passages[0], 'passage')} read"
            typer.echo(f"(no answer)  [{answer['probability']:.2f}, {place}]")
        guess = answers.best_guess
        if guess is not None and guess not in answers:
            # The threshold may ask for more than the larger probability: a wrong answer costs more than none.
            likelier = guess["probability"] > answers[0]["probability"]
            self._print_answer(guess, f"best guess{', likelier but below the threshold' if likelier else ''}: ")

    def _print_answer(self, answer: Answer, label: str = "") -> None:
        from lamella.errors import printable

        place = f"characters {answer['start']}-{answer['end']}"
        if self.several:
            place = f"{printable(answer['file'])}, {place}"
        elif "file" in answer:
            unit = next(unit for unit in ("page", "line", "paragraph") if unit in answer)
            separator = ":" if unit == "line" else f", {unit} "  # terminals and editors open file:line
            place = f"{printable(answer['file'])}{separator}{answer[unit]}"
        typer.echo(f"{label}{_one_line(answer['answer'])}  [{answer['probability']:.2f}, {place}]")
        _print_sentence(answer)
        if "layers" in answer:
            _print_layers(answer["layers"])

    def _log(self, line: str) -> None:
        """Print a line to standard error, once if it is the same for many questions."""
        if line not in self.logged:
            self.logged.add(line)
            typer.echo(f"{line} (--passages all reads everything)", err=True)


def _split_words(words: Sequence[str], sources: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the question and the documents: a shell that expands `--in *.md` makes arguments of all but the first."""
    from lamella.errors import UsageError, shorten

    files = [word for word in words if sources and os.path.exists(os.path.expanduser(word))]
    questions = [word for word in words if word not in files]
    if len(questions) > 1:
        where = ", check the file names" if sources else ""
        raise UsageError(
            f"ask: expected one question, got {len(questions)} arguments, the second {shorten(questions[1], 300)}; "
            f"put the question in quotes{where}, or ask several with --questions FILE."
        )
    return (questions[0] if questions else None), [*sources, *files]


def _print_sentence(answer: Answer) -> None:
    """Print the sentence of an answer, with the answer highlighted on a terminal, or else in brackets."""
    before, found, after = map(_without_controls, answer.sentence())
    found = _shorten_middle(found)
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
        from rich.console import Console
        from rich.text import Text

        line = Text.assemble("  ", (before, "dim"), (found, "bold reverse"), (after, "dim"))
        Console(highlight=False).print(line, soft_wrap=True)
    else:
        typer.echo(f"  {before}[{found}]{after}")


def _one_line(text: str) -> str:
    """Return an answer as a line shows it: white space collapsed, the middle of a very long one left out."""
    return _shorten_middle(_without_controls(" ".join(text.split())))


def _without_controls(text: str) -> str:
    """Replace control characters, which a terminal would obey: a text may come from anybody."""
    return "".join("\ufffd" if unicodedata.category(character) == "Cc" else character for character in text)


def _shorten_middle(text: str) -> str:
    half = LONGEST_ANSWER // 2
    return text if len(text) <= LONGEST_ANSWER else f"{text[:half]} … {text[-half:]}"


def _print_layers(found: dict[str, Any]) -> None:
    """Print the layers with the largest weights for the start and the end of an answer: those of its outer tokens."""
    for output, token in zip(("start", "end"), (found["tokens"][0], found["tokens"][-1]), strict=True):
        weights = token["weights"][output]
        largest = sorted(range(len(weights)), key=lambda place: -abs(weights[place]))[:LAYERS_SHOWN]
        shown = ", ".join(f"{found['layers'][place]} ({weights[place]:.2f})" for place in largest)
        typer.echo(f"  layers of the {output}: {shown}")


def _prompt() -> Iterator[str]:
    """Yield the questions that are typed at a prompt, until an empty line, the end of the input or an interrupt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, gives `input` its editing and history
    typer.echo("Type a question; an empty line ends.", err=True)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while question := input("? ").strip():
            yield question


def _piped() -> Iterator[str]:
    """Yield the questions on standard input as they come; blank lines are skipped, as in a file of questions."""
    from lamella.errors import UnreadableError, UsageError

    asked = False
    try:
        for line in sys.stdin:
            line.encode()  # in some locales, Python hides undecodable bytes in the text instead of refusing them
            if question := line.strip("\ufeff \t\r\n"):
                asked = True
                yield question
    except UnicodeError:
        raise UnreadableError(
            f"ask: standard input: expected {sys.stdin.encoding.upper()} text, got bytes of another encoding; save the "
            "questions in a file, and pass --questions FILE --encoding NAME."
        ) from None
    if not asked:
        raise UsageError("ask: expected a question, or one per line on standard input, found none.")


def _parse_passages(value: str) -> int | str | None:
    from lamella.errors import UsageError, shorten

    if value == "all":
        return None
    if value != "auto" and not (value.isdecimal() and int(value)):
        raise UsageError(f"ask --passages: expected a number of at least 1, auto or all, got {shorten(value)}.")
    return value if value == "auto" else int(value)


def _read_questions(source: str, encoding: str | None) -> list[str]:
    from lamella.errors import UsageError

    lines = [line.strip() for line in _read_text(source, encoding, "--questions").splitlines()]
    if not any(lines):
        raise UsageError(f"ask --questions {source}: expected one question per line, found none.")
    return [line for line in lines if line]


def _read_text(source: str, encoding: str | None, option: str) -> str:
    from lamella.data.file_formats.file_types import recognise_binary
    from lamella.data.html_text import looks_like_html, text_of_html
    from lamella.documents.markdown_text import blank_markup
    from lamella.errors import UnreadableError, printable, truncate
    from lamella.text_encoding import decode_text, page_encoding, unify_line_ends

    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(os.path.expanduser(source)).read_bytes()
        where = f"ask {option} {printable(source)}"
        if encoding is None and (binary := recognise_binary(data)) is not None:
            raise UnreadableError(
                f"{where}: expected a text or HTML file, got {binary.name}; --in reads PDF, docx and gzip files."
            )
        advice = "save it as UTF-8, or pass --encoding {encoding}"
        text = decode_text(data, source, encoding or page_encoding(data), advice=advice)
        if "\0" in text:
            raise UnreadableError(f"{where}: expected a text or HTML file, got binary data; save it as text first.")
        if option == "--questions" or not (
            looks_like_html(text) or source.lower().endswith((".html", ".htm", ".xhtml"))
        ):
            text = unify_line_ends(text)  # as in documents and on the server, so that places are the same
            is_markdown = option == "--context" and source.lower().endswith((".md", ".markdown"))
            return blank_markup(text) if is_markdown else text  # its words stay in their places
        typer.echo(f"{source}: read as HTML; positions are characters of the text without tags", err=True)
        return text_of_html(text)
    except OSError as error:
        shown = truncate(" ".join(source.split()), LONGEST_ECHO)  # it may be the text itself
        advice = ", or the text itself with --text" if option == "--context" else ""
        if isinstance(error, IsADirectoryError) and option == "--context":
            advice = f"{advice}; --in reads folders"
        raise UnreadableError(
            f"ask {option} {shown!r}: cannot be read ({error.strerror}); give a file, - for standard input{advice}."
        ) from None
