"""The data doctor: every problem of the given files, and their statistics.

The readers report what is wrong with the structure of a file; here the content is examined, and the files are compared
with one another. The mending itself is in fixes.py.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lamella.data.examples import Context, Example
from lamella.data.fixes import diagnose
from lamella.data.formats import DataFile
from lamella.data.oddities import odd_characters
from lamella.data.problems import Problem, quote
from lamella.data.statistics import CountedTokens, Statistics, Tokenizer, contexts_of, count_tokens, measure
from lamella.progress import progress

UNKNOWN_RATE = 0.05  # of a script's tokens; above it, an encoder does not know the language


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
            counted = count_tokens(file, tokenizer)
            problems += _check_tokens(file, counted, max_query_length, max_seq_length)
            tokens = counted.statistics(max_query_length)
        statistics.append(measure(file, tokens))
    problems += _check_between(files)
    return Report(tuple(problems), tuple(statistics))


def _check_contexts(file: DataFile) -> Iterator[Problem]:
    """What can be said of a context by itself, once for each."""
    titles: dict[str, str] = {}
    for context in contexts_of(file):
        article = context.title or None
        if not context.text.strip():
            yield Problem("empty_context", file.path, f"context {quote(context.text)} is empty", article)
            continue
        for kind, reason in odd_characters(context.text):
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
        for kind, reason in odd_characters(example.question):
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


def _check_tokens(
    file: DataFile, counted: CountedTokens, max_query_length: int, max_seq_length: int
) -> Iterator[Problem]:
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
