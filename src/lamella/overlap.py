"""Run work in a thread beside the main one, which waits for an encoder most of the time.

Tokenizers, numpy, onnxruntime and torch release Python's global lock while they compute, so a thread gets through its
work in that time. All work of one thread is done in order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")
Run = Callable[..., None]  # takes a call and its arguments
PENDING = 4  # calls that may wait for the thread, so that their arguments do not fill the memory


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield items, each made in a thread while the one before is used; an error is raised in its item's place."""
    with ThreadPoolExecutor(1, "read-ahead") as thread:
        next_item: Future[list[Item]] = thread.submit(_next_of, items)
        while item := next_item.result():
            next_item = thread.submit(_next_of, items)
            yield item[0]


def _next_of(items: Iterator[Item]) -> list[Item]:
    """Return the next item in a list, or an empty list at the end."""
    return list(itertools.islice(items, 1))


@contextmanager
def run_behind(in_thread: bool = True) -> Iterator[Run]:
    """Yield `run(call, *arguments)`, which runs calls in order in a thread; without `in_thread`, at once.

    When the block ends, all calls are done. The first error of a call is raised by a later `run`, or at the end of the
    block. After an error in the block, waiting calls are dropped.
    """
    if not in_thread:
        yield lambda call, *arguments: call(*arguments)
        return
    pending: deque[Future[None]] = deque()
    thread = ThreadPoolExecutor(1, "behind")

    def run(call: Callable[..., None], *arguments: Any) -> None:
        while pending and (pending[0].done() or len(pending) >= PENDING):
            pending.popleft().result()
        pending.append(thread.submit(call, *arguments))

    try:
        yield run
        while pending:
            pending.popleft().result()
    finally:
        thread.shutdown(cancel_futures=True)
