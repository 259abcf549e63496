"""Work in a thread beside the main one is done in order, and its errors are raised in the main one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lamella.overlap import PENDING, read_ahead, run_behind


def test_items_are_made_in_order_one_ahead() -> None:
    made: list[int] = []
    threads = set()

    def numbers() -> Iterator[int]:
        for number in range(20):
            made.append(number)
            threads.add(threading.current_thread())
            yield number

    for number in read_ahead(numbers()):
        assert len(made) <= number + 2
    assert made == list(range(20))
    assert threading.current_thread() not in threads


def test_an_error_of_an_item_is_raised_after_the_items_before_it() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise KeyError("second")

    items = read_ahead(numbers())
    assert next(items) == 1
    with pytest.raises(KeyError, match="second"):
        next(items)


@pytest.mark.parametrize("in_thread", [True, False])
def test_calls_run_in_order_and_are_done_at_the_end(in_thread: bool) -> None:
    done: list[int] = []
    with run_behind(in_thread) as run:
        for number in range(50):
            run(done.append, number)
            assert len(done) >= number - PENDING
    assert done == list(range(50))


@pytest.mark.parametrize("in_thread", [True, False])
def test_an_error_of_a_call_is_raised(in_thread: bool) -> None:
    def fail() -> None:
        raise KeyError("no")

    def run_twice() -> None:
        with run_behind(in_thread) as run:
            run(fail)
            run(fail)

    with pytest.raises(KeyError, match="no"):
        run_twice()


def test_no_call_starts_after_an_error_in_the_block() -> None:
    begun, released = threading.Event(), threading.Event()
    done: list[int] = []

    def wait() -> None:
        begun.set()
        released.wait(10)

    def fail_while_calls_wait() -> None:
        with run_behind() as run:
            run(wait)
            run(done.append, 1)
            begun.wait(10)
            threading.Timer(0.05, released.set).start()
            raise KeyError("block")

    with pytest.raises(KeyError, match="block"):
        fail_while_calls_wait()
    assert done == []
