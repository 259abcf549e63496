"""The data doctor: every problem of the given files, and their statistics.

The readers report what is wrong with the structure of a file; here the content is examined, and the files are compared
with one another. The mending itself is in fixes.py.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from lamella.data.examples import Answer, Context, Example
from lamella.data.fixes import diagnose, leave_out, mend
from lamella.data.problems import Problem, quote
from lamella.data.readers import DataFile, read
from lamella.errors import DataError
from lamella.progress import progress

UNKNOWN_RATE = 0.05  # of a script's tokens; above it, an encoder does not know the language


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def encode_batch(self, input: list[str], is_pretokenized: bool = ..., add_special_tokens: bool = ...) -> Any: ...

    def token_to_id(self, token: str) -> int | None: ...

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

    def num_special_tokens_to_add(self, is_pair: bool) -> int: ...


@dataclass(frozen=True)
class Lengths:
    """How long texts are."""

    mean: float
    longest: int


@dataclass(frozen=True)
class ScriptTokens:
    """The tokens of the texts in one script, and how many of them the tokenizer does not know."""

    tokens: int
    unknown: int
    unknown_rate: float


@dataclass(frozen=True)
class TokenStatistics:
    """What a tokenizer makes of a file; `questions_cut` counts the questions longer than `max_query_length`."""

    contexts: Lengths
    questions: Lengths
    questions_cut: int
    scripts: dict[str, ScriptTokens]


@dataclass(frozen=True)
class Statistics:
    """A file in numbers; lengths in characters. A question asked of several contexts counts once for each."""

    file: str
    format: str
    version: str | None
    articles: int
    contexts: int
    questions: int
    unanswerable: int
    unread: int
    context_length: Lengths
    question_length: Lengths
    answer_length: Lengths
    tokens: TokenStatistics | None = None


@dataclass(frozen=True)
class Report:
    """What the doctor found."""

    problems: tuple[Problem, ...]
    statistics: tuple[Statistics, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "warning")

    @property
    def clean(self) -> bool:
        """Notes do not count: the best data sets give rise to some."""
        return not self.errors and not self.warnings

    def to_json(self) -> dict[str, Any]:
        """The report as `lamella check --json` prints it."""
        return {
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "problems": [problem.to_json() for problem in self.problems],
            "statistics": [dataclasses.asdict(one) for one in self.statistics],
        }


@dataclass(frozen=True)
class Loaded:
    """Examples fit to train on; `mended` counts problems, `skipped` counts questions that were left out."""

    examples: tuple[Example, ...]
    files: tuple[DataFile, ...]
    mended: int
    skipped: int


def check(
    files: Sequence[DataFile],
    *,
    tokenizer: Tokenizer | None = None,
    max_query_length: int = 64,
    max_seq_length: int = 384,
) -> Report:
    """Examine files one by one and against each other; a tokenizer adds the checks that need one."""
    with progress("checking", None):
        return _check(files, tokenizer, max_query_length, max_seq_length)


def _check(
    files: Sequence[DataFile], tokenizer: Tokenizer | None, max_query_length: int, max_seq_length: int
) -> Report:
    problems: list[Problem] = []
    statistics = []
    for file in files:
        problems += file.problems
        problems += _check_contexts(file)
        problems += _check_examples(file)
        problems += _check_repetitions(file)
        if not file.examples:
            problems.append(Problem("no_questions", file.path, "no question that can be read"))
        tokens = None
        if tokenizer is not None:
            counted = _count_tokens(file, tokenizer)
            problems += _check_tokens(file, counted, max_query_length, max_seq_length)
            tokens = counted.statistics(max_query_length)
        statistics.append(_measure(file, tokens))
    problems += _check_between(files)
    return Report(tuple(problems), tuple(statistics))


def load_examples(
    paths: Iterable[str | Path],
    *,
    on_bad_answer: Literal["refuse", "fix", "skip", "ignore"] = "refuse",
    labelled: bool = False,
) -> Loaded:
    """Read the examples of files; their errors are refused, mended, left out with their questions, or ignored.

    `labelled` refuses questions of which nobody says whether they have an answer: they can be answered, but neither
    learnt from nor scored.
    """
    files = tuple(read(path) for path in dict.fromkeys(map(str, paths)))
    bare = [problem for file in files for problem in file.problems if problem.kind == "unlabelled" and labelled]
    if bare:
        raise DataError(f"{bare[0]}. Training and scoring need answers, or is_impossible where there is none.")
    if on_bad_answer == "ignore":
        return Loaded(tuple(itertools.chain(*(file.examples for file in files))), files, 0, _unread(files))
    report = check(files)
    if report.errors and on_bad_answer == "refuse":
        raise DataError(_refusal(report.errors))
    examples: list[Example] = []
    mended = skipped = 0
    for file in files:
        if on_bad_answer == "fix":
            kept, done, _ = mend(file, report.errors)
            mended += done
        else:
            kept = leave_out(file, report.errors)
        examples += kept
        skipped += len(file.examples) - len(kept)
    if not examples:
        names = ", ".join(file.path for file in files)
        raise DataError(f"{names}: no question is left to use; see what is wrong with: lamella check {names}")
    return Loaded(tuple(examples), files, mended, skipped + _unread(files))


def _unread(files: Iterable[DataFile]) -> int:
    return sum(file.unread for file in files)


def _refusal(errors: Sequence[Problem]) -> str:
    files = list(dict.fromkeys(problem.file for problem in errors))
    count = f"{len(errors)} error{'s' if len(errors) > 1 else ''}"
    return (
        f"{', '.join(files)}: {count}, the first: {errors[0]}. "
        f"See them all with: lamella check {' '.join(files)} (or pass --on-bad-answer fix|skip)."
    )


def _check_contexts(file: DataFile) -> Iterator[Problem]:
    """What can be said of a context by itself, once for each."""
    titles: dict[str, str] = {}
    for context in _contexts(file):
        article = context.title or None
        if not context.text.strip():
            yield Problem("empty_context", file.path, f"context {quote(context.text)} is empty", article)
            continue
        for kind, reason in _odd_characters(context.text):
            yield Problem(kind, file.path, f"context {quote(context.text)}: {reason}", article)
        first = titles.setdefault(_alike(context.text), context.title)
        if first != context.title:
            reason = f"context {quote(context.text)} is also under the title {quote(first)}"
            yield Problem("context_under_two_titles", file.path, reason, article)


def _check_examples(file: DataFile) -> Iterator[Problem]:
    """What can be said of a question and its answers by themselves."""
    for index in _asked_first(file):
        example = file.examples[index]
        if not example.question.strip():
            yield _about(file, index, "empty_question", f"question {quote(example.question)} is empty")
        for kind, reason in _odd_characters(example.question):
            yield _about(file, index, kind, f"question {quote(example.question)}: {reason}")
    for index, example in enumerate(file.examples):
        if not example.context.text.strip():
            continue  # said once, of the context
        for answer in dict.fromkeys(example.answers):
            diagnosis = diagnose(answer, example.context.text)
            if diagnosis is not None:
                yield _about(file, index, diagnosis.kind, diagnosis.reason)
        for answer in dict.fromkeys(example.plausible_answers):
            diagnosis = diagnose(answer, example.context.text)
            if diagnosis is not None:
                yield _about(file, index, "plausible_answer_misplaced", f"plausible {diagnosis.reason}")


def _check_repetitions(file: DataFile) -> Iterator[Problem]:
    """Questions that are there twice within a file."""
    seen_ids: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    seen_groups: dict[str | None, str] = {}
    seen_questions: dict[tuple[Context, str], tuple[str, frozenset[str]]] = {}
    for index, example in enumerate(file.examples):
        content, earlier = _content(example), seen_ids[example.id]
        first_of_group = seen_groups.setdefault(example.group, example.question)
        if content in earlier:
            reason = "the same question, with the same id, is there before"
            yield _about(file, index, "duplicate_question", reason)
            continue
        if earlier or (example.group is not None and first_of_group != example.question):
            reason = f"the id is taken by another question than {quote(example.question)}"
            yield _about(file, index, "duplicate_id", reason)
        earlier.add(content)
        texts = frozenset(_alike(answer.text).casefold() for answer in example.answers)
        asked = (example.context, _alike(example.question).casefold())
        first_id, first_texts = seen_questions.setdefault(asked, (example.id, texts))
        if not _agree(first_texts, texts):
            reason = f"{quote(example.question)} is also asked as {quote(first_id)}, "
            reason += f"with {_listed(first_texts)} instead of {_listed(texts)}"
            yield _about(file, index, "conflicting_answers", reason)


def _check_between(files: Sequence[DataFile]) -> Iterator[Problem]:
    """Ids and contexts that a later file shares with an earlier one."""
    owners: dict[str, str] = {}  # the first file with an id
    homes: dict[tuple[object, ...], str] = {}  # the first file with an id and content
    contexts: dict[str, tuple[str, str]] = {}
    for file in files if len(files) > 1 else ():
        for index, example in enumerate(file.examples):
            # A question asked of several contexts is one: should its id be taken, all its examples need another.
            id = example.group or example.id
            owner = owners.setdefault(id, file.path)
            home = homes.setdefault((id, *_content(example)), file.path)
            if home != file.path:
                reason = f"the same question, with the same id, is in {home}"
                yield _about(file, index, "question_in_two_files", reason)
            elif owner != file.path:
                reason = f"the id is taken by another question in {owner}"
                yield _about(file, index, "id_in_two_files", reason)
        for text, context in _telling_contexts(file).items():
            path, title = contexts.setdefault(text, (file.path, context.title))
            if path != file.path:
                reason = f"context {quote(context.text)} is also in {path}" + (f", {quote(title)}" if title else "")
                yield Problem("context_in_two_files", file.path, reason, context.title or None)


def _about(file: DataFile, index: int, kind: str, reason: str) -> Problem:
    """A problem of one example."""
    example = file.examples[index]
    return Problem(kind, file.path, reason, example.context.title or None, example.id, example=index)


def _asked_first(file: DataFile) -> list[int]:
    """The examples to speak of a question at: one each, also where it is asked of several contexts."""
    groups: set[str] = set()
    firsts = []
    for index, example in enumerate(file.examples):
        if example.group is None or example.group not in groups:
            firsts.append(index)
        if example.group is not None:
            groups.add(example.group)
    return firsts


def _contexts(file: DataFile) -> list[Context]:
    return list(dict.fromkeys(example.context for example in file.examples))


def _telling_contexts(file: DataFile) -> dict[str, Context]:
    """The contexts that give something away when seen in another file.

    Of those a question is asked of by the dozen, only the ones with an answer: the others are drawn from a pool that
    files share as a matter of course.
    """
    contexts = (example.context for example in file.examples if example.group is None or example.answers)
    return {_alike(context.text): context for context in dict.fromkeys(contexts) if context.text.strip()}


def _content(example: Example) -> tuple[object, ...]:
    return example.question, example.context.text, example.answers


def _alike(text: str) -> str:
    """Equal for texts that differ in white space alone."""
    return " ".join(text.split())


def _agree(some: frozenset[str], others: frozenset[str]) -> bool:
    """Whether two sets of answers have one in common, be it as a part: `guildhall`, `the guildhall in london`."""
    return some == others or any(one in other or other in one for one in some for other in others)


def _listed(texts: frozenset[str]) -> str:
    return " / ".join(quote(text) for text in sorted(texts)) or "no answer"


_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# UTF-8 read as Windows-1252, where `é` becomes `Ã©` and `’` becomes `â€™`. The first byte of a character is followed by
# those that continue it; where letters of real texts would do (`CAFÉ »`), a mark or space does not count as one.
_NEXT = "[\x80-¿€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
_NEXT_NOT_MARK = "[\x80-\x9f¡-ª¬-º¼-¿€‚ƒ„†‡ˆ‰ŠŒŽ•˜™šœžŸ]"
_MOJIBAKE = re.compile(
    f"[ÂÃ]{_NEXT}|[ÄÅ]{_NEXT_NOT_MARK}|(?:[ÐÑ]{_NEXT}){{2}}|[âãïìëê]{_NEXT_NOT_MARK}{_NEXT}|ð{_NEXT_NOT_MARK}{_NEXT}{{2}}|ï»¿"
)


def _odd_characters(text: str) -> Iterator[tuple[str, str]]:
    if text.isascii() and text.isprintable():
        return
    controls = _CONTROL.findall(text)
    if controls:
        yield "control_character", f"has {_code_points(controls)}"
    if "\ufffd" in text:
        yield "replacement_character", f"has U+FFFD {text.count(chr(0xFFFD))} times"
    for match in _MOJIBAKE.finditer(text):
        original = _undo_wrong_decoding(match[0])
        if original is not None:
            yield "mojibake", f"{quote(match[0])} was once {quote(original)}"
            return


def _code_points(characters: Iterable[str]) -> str:
    return ", ".join(f"U+{ord(character):04X}" for character in sorted(set(characters)))


def _undo_wrong_decoding(text: str) -> str | None:
    """The text that UTF-8 bytes read as Windows-1252 once were; bytes that it lacks were read as C1 controls."""
    try:
        return b"".join(character.encode("latin-1" if character <= "\xff" else "cp1252") for character in text).decode(
            "utf-8"
        )
    except UnicodeError:
        return None


@dataclass(frozen=True)
class _Counted:
    """Token counts of a file's contexts and, one per example, of its questions."""

    contexts: list[int]
    questions: list[int]
    scripts: dict[str, ScriptTokens]
    special_tokens: int

    def statistics(self, max_query_length: int) -> TokenStatistics:
        cut = sum(count > max_query_length for count in self.questions)
        return TokenStatistics(_lengths(self.contexts), _lengths(self.questions), cut, self.scripts)


def _count_tokens(file: DataFile, tokenizer: Tokenizer) -> _Counted:
    tokenizer = copy.deepcopy(tokenizer)  # the caller's keeps its settings
    tokenizer.no_padding()
    tokenizer.no_truncation()
    unknown = {tokenizer.token_to_id(token) for token in ("[UNK]", "<unk>")} - {None}
    tokens: Counter[str] = Counter()
    unknowns: Counter[str] = Counter()

    def count(texts: Iterable[str]) -> dict[str, int]:
        """The number of tokens of each different text; adds to the counts of its script."""
        counts = {}
        distinct = list(dict.fromkeys(texts))
        for begin in range(0, len(distinct), 1000):
            batch = distinct[begin : begin + 1000]
            for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
                ids = encoding.ids
                script = _script(text)
                counts[text] = len(ids)
                tokens[script] += len(ids)
                unknowns[script] += sum(id in unknown for id in ids)
        return counts

    contexts = count(context.text for context in _contexts(file))
    questions = count(example.question for example in file.examples)
    return _Counted(
        [contexts[context.text] for context in _contexts(file)],
        [questions[example.question] for example in file.examples],
        {
            script: ScriptTokens(number, unknowns[script], unknowns[script] / max(number, 1))
            for script, number in sorted(tokens.items())
        },
        tokenizer.num_special_tokens_to_add(True),
    )


def _check_tokens(file: DataFile, counted: _Counted, max_query_length: int, max_seq_length: int) -> Iterator[Problem]:
    for index in _asked_first(file):
        length = counted.questions[index]
        if length + counted.special_tokens >= max_seq_length:
            reason = f"the question has {length} tokens, a window {max_seq_length}: no room for the context"
            yield _about(file, index, "question_longer_than_window", reason)
        elif length > max_query_length:
            reason = f"the question has {length} tokens and will be cut after {max_query_length}"
            yield _about(file, index, "question_cut", reason)
    for script, counts in counted.scripts.items():
        if counts.unknown_rate > UNKNOWN_RATE:
            reason = f"{script}: {counts.unknown_rate:.1%} of {counts.tokens:,} tokens are unknown to the encoder"
            yield Problem("unknown_tokens", file.path, reason)


_SCRIPTS = {
    "latin": re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]"),
    "greek": re.compile("[\u0370-\u03ff\u1f00-\u1fff]"),
    "cyrillic": re.compile("[\u0400-\u052f]"),
    "hebrew": re.compile("[\u0590-\u05ff]"),
    "arabic": re.compile("[\u0600-\u06ff\u0750-\u077f]"),
    "devanagari": re.compile("[\u0900-\u097f]"),
    "thai": re.compile("[\u0e00-\u0e7f]"),
    "hangul": re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]"),
    "kana": re.compile("[\u3040-\u30ff]"),
    "han": re.compile("[\u3400-\u4dbf\u4e00-\u9fff]"),
}


def _script(text: str) -> str:
    """The script that most letters of a text are in."""
    if text.isascii():
        return "latin"
    counts = {script: len(letters.findall(text)) for script, letters in _SCRIPTS.items()}
    best = max(counts, key=lambda script: counts[script])
    return best if counts[best] else "other"


def _measure(file: DataFile, tokens: TokenStatistics | None) -> Statistics:
    contexts = _contexts(file)
    answers: list[Answer] = [answer for example in file.examples for answer in example.answers]
    return Statistics(
        file.path,
        file.format,
        file.version,
        articles=len({context.title for context in contexts}),
        contexts=len(contexts),
        questions=len(file.examples),
        unanswerable=sum(not example.answerable for example in file.examples),
        unread=file.unread,
        context_length=_lengths([len(context.text) for context in contexts]),
        question_length=_lengths([len(example.question) for example in file.examples]),
        answer_length=_lengths([len(answer.text) for answer in answers]),
        tokens=tokens,
    )


def _lengths(lengths: Sequence[int]) -> Lengths:
    return Lengths(round(sum(lengths) / len(lengths), 1), max(lengths)) if lengths else Lengths(0.0, 0)
