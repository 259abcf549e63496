"""Questions that wait for the same reader, with the same options, are answered together as a list.

A list takes a fraction of the CPU time of its questions one by one: one thread cuts, computes and decodes its windows
in one go. While a list is answered, the next questions gather, so lists grow with the load; a question that comes alone
is a list of one, and waits for nobody. If a list fails, its questions are answered one by one, so that only the one at
fault fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from lamella.serve.calls import Call, JointCall, answering
from lamella.serve.refusals import RefusedError

logger = logging.getLogger("lamella.serve")

MOST_QUESTIONS = 32  # per list
LONG = 20_000  # characters of a question with its contexts that is answered on its own

Texts = str | list[str]
Pair = tuple[str, Texts]  # a question and its contexts
Answering = Callable[[Sequence[Pair]], Sequence[Any]]  # returns a result for each


@dataclass(eq=False)
class _Waiting:
    """A question that waits for its answer."""

    pair: Pair
    characters: int
    call: Call
    result: asyncio.Future[Any]
    arrived: float = field(default_factory=perf_counter)


class QuestionLists:
    """The questions that wait, by kind. It belongs to one event loop; the lists are answered in threads."""

    def __init__(self, threads: Executor, *, most_characters: int) -> None:
        """Make lists of at most `most_characters` in all their texts."""
        self._threads, self._most_characters = threads, most_characters
        self._waiting: dict[Hashable, deque[_Waiting]] = {}
        self._running: Counter[Hashable] = Counter()

    def submit(
        self,
        kind: Hashable,
        answer: Answering,
        pair: Pair,
        call: Call,
        *,
        at_once: Callable[[], int],
        alone: bool = False,
    ) -> asyncio.Future[Any]:
        """Return the future result of a question; `answer` is called in a thread, for questions of the same kind.

        It begins now if fewer than `at_once()` lists of its kind are being answered, and otherwise waits.
        """
        question, context = pair
        texts = [context] if isinstance(context, str) else context
        waiting = _Waiting(pair, len(question) + sum(map(len, texts)), call, asyncio.get_running_loop().create_future())
        blank = _is_blank(question) or all(map(_is_blank, texts))  # it will be refused, and so would be its list
        if alone or blank or waiting.characters > LONG:
            self._run([waiting], answer, lambda: None)
            return waiting.result
        self._waiting.setdefault(kind, deque()).append(waiting)
        self._begin(kind, answer, at_once)
        return waiting.result

    def _begin(self, kind: Hashable, answer: Answering, at_once: Callable[[], int]) -> None:
        """Begin to answer the questions of a kind, until enough of its lists are being answered."""
        while self._running[kind] < at_once() and (taken := self._take(kind)):
            self._running[kind] += 1
            self._run(taken, answer, partial(self._end, kind, answer, at_once))

    def _end(self, kind: Hashable, answer: Answering, at_once: Callable[[], int]) -> None:
        self._running[kind] -= 1
        self._begin(kind, answer, at_once)
        if not self._running[kind]:
            del self._running[kind]

    def _take(self, kind: Hashable) -> list[_Waiting]:
        """Remove the questions of the next list: those that came first, without those that nobody waits for."""
        waiting = self._waiting.get(kind, deque())
        taken: list[_Waiting] = []
        characters = 0
        while waiting and len(taken) < MOST_QUESTIONS:
            if not waiting[0].result.done():
                characters += waiting[0].characters
                if taken and characters > self._most_characters:
                    break
                taken.append(waiting[0])
            waiting.popleft()
        if not waiting:
            self._waiting.pop(kind, None)
        return taken

    def _run(self, taken: Sequence[_Waiting], answer: Answering, end: Callable[[], None]) -> None:
        def deliver(running: asyncio.Future[list[Any]]) -> None:
            if running.cancelled():  # the threads have been closed, and nobody waits
                return
            end()  # the next list begins while these results are sent
            error = running.exception()
            for waiting, result in zip(taken, [error] * len(taken) if error else running.result(), strict=True):
                if waiting.result.done():
                    continue
                if isinstance(result, BaseException):
                    waiting.result.set_exception(result)
                else:
                    waiting.result.set_result(result)

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._threads, _answer, taken, answer).add_done_callback(deliver)


def _answer(taken: Sequence[_Waiting], answer: Answering) -> list[Any]:
    """Return the result of each question, or its error; this runs in a thread."""
    begin = perf_counter()
    results: dict[_Waiting, Any] = {}
    for waiting in taken:
        waiting.call.waits.append((waiting.arrived, begin))
        if (refusal := waiting.call.refusal()) is not None:
            results[waiting] = refusal
    wanted = [waiting for waiting in taken if waiting not in results]
    results |= zip(wanted, _answer_together(wanted, answer), strict=True)
    return [results[waiting] for waiting in taken]


def _answer_together(wanted: Sequence[_Waiting], answer: Answering) -> list[Any]:
    if len(wanted) > 1:
        try:
            with answering(JointCall([waiting.call for waiting in wanted])):
                results = answer([waiting.pair for waiting in wanted])
                return [result for _, result in zip(wanted, results, strict=True)]
        except RefusedError as error:  # the reader cannot be loaded, or nobody waits any more
            return [waiting.call.refusal() or error for waiting in wanted]
        except Exception as error:  # one of them is at fault; the others must not fail with it
            logger.debug("%d questions are answered one by one: %s", len(wanted), error)
    return [_answer_alone(waiting, answer) for waiting in wanted]


def _answer_alone(waiting: _Waiting, answer: Answering) -> Any:
    try:
        with answering(waiting.call):
            (result,) = answer([waiting.pair])
            return result
    except Exception as error:
        return error


def _is_blank(text: str) -> bool:
    return not text or text.isspace()
