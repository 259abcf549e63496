"""The data doctor: find every problem of the given files, and compute their statistics.

The formats report problems in the structure of a file. This module checks the content and compares the files with each
other. The repairs are in fixes.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lamella.data.doctor.fixes import diagnose
from lamella.data.doctor.problems import Problem, quote
from lamella.data.doctor.statistics import CountedTokens, Statistics, Tokenizer, contexts_of, count_tokens, measure
from lamella.data.examples import Context, Example
from lamella.data.file_formats.formats import DataFile
from lamella.progress import progress

UNKNOWN_RATE = 0.02  # unknown share of a file's tokens above which an encoder does not know the language well
UNKNOWN_RATE_OF_SCRIPT = 0.05  # the same of the texts in one script, which may be few


@dataclass(frozen=True)
class Report:
    """Problems and statistics of the checked files."""

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
        """Whether there are no errors and no warnings; notes do not count, since the best data sets have some."""
        return not self.errors and not self.warnings

    def to_json(self) -> dict[str, Any]:
        """Return the report as `lamella check --json` prints it."""
        return {
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "problems": [problem.to_json() for problem in self.problems],
            "statistics": [dataclasses.asdict(statistics) for statistics in self.statistics],
        }


def check(
    files: Sequence[DataFile],
    *,
    tokenizer: Tokenizer | None = None,
    max_query_length: int = 64,
    max_seq_length: int = 384,
) -> Report:
    """Check files one by one and against each other; a tokenizer adds the checks of token counts."""
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
            problems.append(Problem("no_questions", file.path, "no readable question"))
        tokens = None
        if tokenizer is not None:
            counted = count_tokens(file, tokenizer)
            problems += _check_tokens(file, counted, max_query_length, max_seq_length)
            tokens = counted.statistics(max_query_length)
        statistics.append(measure(file, tokens))
    problems += _check_between(files)
    return Report(tuple(problems), tuple(statistics))


def _check_contexts(file: DataFile) -> Iterator[Problem]:
    """Check each context by itself, once."""
    titles: dict[str, str] = {}
    ids_of_empty: dict[Context, list[str]] = {}
    for example in file.examples:
        if not example.context.text.strip():
            ids_of_empty.setdefault(example.context, []).append(example.id)
    for context in contexts_of(file):
        article = context.title or None
        if ids := ids_of_empty.get(context):
            more = f" and {len(ids) - 1:,} more" if len(ids) > 1 else ""
            reason = f"context {quote(context.text)} is empty (question {quote(ids[0])}{more})"
            yield Problem("empty_context", file.path, reason, article)
            continue
        for kind, reason in _odd_characters(context.text):
            yield Problem(kind, file.path, f"context {quote(context.text)}: {reason}", article)
        first = titles.setdefault(_collapse_spaces(context.text), context.title)
        if first != context.title:
            reason = f"context {quote(context.text)} also appears under the title {quote(first)}"
            yield Problem("context_under_two_titles", file.path, reason, article)


def _check_examples(file: DataFile) -> Iterator[Problem]:
    """Check each question and its answers by themselves."""
    for index in _first_of_each_question(file):
        example = file.examples[index]
        if not example.question.strip():
            yield _problem(file, index, "empty_question", f"question {quote(example.question)} is empty")
        for kind, reason in _odd_characters(example.question):
            yield _problem(file, index, kind, f"question {quote(example.question)}: {reason}")
    for index, example in enumerate(file.examples):
        if not example.context.text.strip():
            continue  # reported once, for the context
        for answer in dict.fromkeys(example.answers):
            diagnosis = diagnose(answer, example.context.text)
            if diagnosis is not None:
                yield _problem(file, index, diagnosis.kind, diagnosis.reason)
        for answer in dict.fromkeys(example.plausible_answers):
            diagnosis = diagnose(answer, example.context.text)
            if diagnosis is not None:
                yield _problem(file, index, "plausible_answer_misplaced", f"plausible {diagnosis.reason}")


def _check_repetitions(file: DataFile) -> Iterator[Problem]:
    """Find questions that appear twice in one file."""
    seen_ids: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    seen_groups: dict[str | None, str] = {}
    seen_questions: dict[tuple[Context, str], tuple[str, frozenset[str]]] = {}
    for index, example in enumerate(file.examples):
        content, earlier = _content(example), seen_ids[example.id]
        first_of_group = seen_groups.setdefault(example.group, example.question)
        if content in earlier:
            reason = "the same question with the same id appears earlier in the file"
            yield _problem(file, index, "duplicate_question", reason)
            continue
        if earlier or (example.group is not None and first_of_group != example.question):
            reason = f"the id is already used by a question other than {quote(example.question)}"
            yield _problem(file, index, "duplicate_id", reason)
        earlier.add(content)
        texts = frozenset(_collapse_spaces(answer.text).casefold() for answer in example.answers)
        asked = (example.context, _collapse_spaces(example.question).casefold())
        first_id, first_texts = seen_questions.setdefault(asked, (example.id, texts))
        if not _agree(first_texts, texts):
            reason = f"{quote(example.question)} is also asked as {quote(first_id)}, "
            reason += f"with {_join(first_texts)} instead of {_join(texts)}"
            yield _problem(file, index, "conflicting_answers", reason)


def _check_between(files: Sequence[DataFile]) -> Iterator[Problem]:
    """Find ids and contexts that a later file shares with an earlier one."""
    owners: dict[str, str] = {}  # the first file with an id
    homes: dict[tuple[object, ...], str] = {}  # the first file with an id and content
    contexts: dict[str, tuple[str, str]] = {}
    for file in files if len(files) > 1 else ():
        for index, example in enumerate(file.examples):
            # A question about several contexts has one id: if it is already used, all its examples need another.
            id = example.group or example.id
            owner = owners.setdefault(id, file.path)
            home = homes.setdefault((id, *_content(example)), file.path)
            if home != file.path:
                reason = f"the same question with the same id is in {home}"
                yield _problem(file, index, "question_in_two_files", reason)
            elif owner != file.path:
                reason = f"the id is already used by another question in {owner}"
                yield _problem(file, index, "id_in_two_files", reason)
        for text, context in _leaking_contexts(file).items():
            path, title = contexts.setdefault(text, (file.path, context.title))
            if path != file.path:
                reason = f"context {quote(context.text)} is also in {path}" + (f", {quote(title)}" if title else "")
                yield Problem("context_in_two_files", file.path, reason, context.title or None)


def _check_tokens(
    file: DataFile, counted: CountedTokens, max_query_length: int, max_seq_length: int
) -> Iterator[Problem]:
    for index in _first_of_each_question(file):
        length = counted.questions[index]
        if length + counted.special_tokens >= max_seq_length:
            reason = f"the question has {length} tokens, a window holds {max_seq_length}: no room for the context"
            yield _problem(file, index, "question_longer_than_window", reason)
        elif length > max_query_length:
            reason = f"the question has {length} tokens and will be truncated to {max_query_length}"
            yield _problem(file, index, "question_cut", reason)
    unknown = {name: script for name, script in counted.scripts.items() if script.unknown_rate > UNKNOWN_RATE_OF_SCRIPT}
    for name, script in unknown.items():
        reason = f"{name}: {script.unknown_rate:.1%} of {script.tokens:,} tokens are unknown to the encoder"
        yield Problem("unknown_tokens", file.path, reason)
    if not unknown and counted.unknown_rate > UNKNOWN_RATE:
        reason = f"{counted.unknown_rate:.1%} of {counted.tokens:,} tokens are unknown to the encoder"
        yield Problem("unknown_tokens", file.path, reason)


def _problem(file: DataFile, index: int, kind: str, reason: str) -> Problem:
    """Return a problem of one example."""
    example = file.examples[index]
    return Problem(kind, file.path, reason, example.context.title or None, example.id, example=index)


def _first_of_each_question(file: DataFile) -> list[int]:
    """Return one example index per question, also for questions about several contexts."""
    groups: set[str] = set()
    firsts = []
    for index, example in enumerate(file.examples):
        if example.group is None or example.group not in groups:
            firsts.append(index)
        if example.group is not None:
            groups.add(example.group)
    return firsts


def _leaking_contexts(file: DataFile) -> dict[str, Context]:
    """Return the contexts that would leak answers if another file had them too.

    For a question about several contexts, only contexts with an answer count: the others usually come from a pool that
    all files share.
    """
    contexts = (example.context for example in file.examples if example.group is None or example.answers)
    return {_collapse_spaces(context.text): context for context in dict.fromkeys(contexts) if context.text.strip()}


def _content(example: Example) -> tuple[object, ...]:
    return example.question, example.context.text, example.answers


def _collapse_spaces(text: str) -> str:
    """Return the same string for texts that differ in white space only."""
    return " ".join(text.split())


def _agree(first: frozenset[str], second: frozenset[str]) -> bool:
    """Check whether two sets share an answer; `guildhall` matches `the guildhall in london`."""
    return first == second or any(a in b or b in a for a in first for b in second)


def _join(texts: frozenset[str]) -> str:
    return " / ".join(quote(text) for text in sorted(texts)) or "no answer"


def _odd_characters(text: str) -> Iterator[tuple[str, str]]:
    """Yield kind and reason of control characters, replacement characters and wrongly decoded text."""
    if text.isascii() and text.isprintable():
        return
    controls = _CONTROL.findall(text)
    if controls:
        yield "control_character", f"has {_code_points(controls)}"
    if "\ufffd" in text:
        yield "replacement_character", f"has {text.count(chr(0xFFFD))} of U+FFFD"
    for match in _MOJIBAKE.finditer(text):
        original = _undo_wrong_decoding(match[0])
        if original is not None:
            yield "mojibake", f"{quote(match[0])} was {quote(original)} before it was decoded wrongly"
            return


_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

# UTF-8 decoded as Windows-1252 turns `é` into `Ã©` and `’` into `â€™`: a leading byte, then continuation bytes.
# Where both also occur next to each other in correct text (`CAFÉ »`), punctuation and spaces do not count as these.
_NEXT = "[\x80-¿€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
_NEXT_NOT_MARK = "[\x80-\x9f¡-ª¬-º¼-¿€‚ƒ„†‡ˆ‰ŠŒŽ•˜™šœžŸ]"
_MOJIBAKE = re.compile(
    f"[ÂÃ]{_NEXT}|[ÄÅ]{_NEXT_NOT_MARK}|(?:[ÐÑ]{_NEXT}){{2}}|[âãïìëê]{_NEXT_NOT_MARK}{_NEXT}|ð{_NEXT_NOT_MARK}{_NEXT}{{2}}|ï»¿"
)


def _code_points(characters: Iterable[str]) -> str:
    return ", ".join(f"U+{ord(character):04X}" for character in sorted(set(characters)))


def _undo_wrong_decoding(text: str) -> str | None:
    """Return the original of UTF-8 text decoded as Windows-1252 (undefined bytes became C1 controls), else None."""
    try:
        return b"".join(character.encode("latin-1" if character <= "\xff" else "cp1252") for character in text).decode(
            "utf-8"
        )
    except UnicodeError:
        return None
