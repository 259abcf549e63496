"""Lists of questions: those that wait are answered together, and none waits, fails or changes because of another."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from lamella import Reader
from lamella.errors import UsageError
from lamella.serve.answering import AskOptions
from lamella.serve.calls import CALL, Call, JointCall
from lamella.serve.question_lists import LONG, MOST_QUESTIONS, Pair, QuestionLists
from lamella.serve.reader_pool import LoadedReader
from lamella.serve.refusals import AbandonedError, RefusedError, TimedOutError
from lamella.serve.schemas import Ask, HuggingFaceAsk
from lamella.serve.service import Service
from lamella.serve.settings import Settings
from tiny_reader import save_tiny_bert, save_tiny_reader

TEXT = "Titan was found by Christiaan Huygens in 1655. It is the largest moon of Saturn, probe {} landed on it in 2005."


def in_time(seconds: float = 60.0) -> Call:
    return Call(perf_counter() + seconds, seconds)


class Answers:
    """Answers each question with itself, once the first lists may end."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self.go = threading.Event()

    def __call__(self, pairs: Sequence[Pair]) -> list[str]:
        self.lists.append([question for question, _ in pairs])
        if "first" in self.lists[-1][0]:
            assert self.go.wait(10)
        if any(question == "bad" for question, _ in pairs):
            raise UsageError("bad: expected another question.")
        return [question.upper() for question, _ in pairs if question != "lost"]


def answer_behind_others(
    questions: Sequence[tuple[str, str, Call]],
    *,
    most_characters: int = 10**6,
    at_once: int = 2,
    wait: Callable[[], Any] = lambda: None,
) -> tuple[Answers, list[Any]]:
    """Submit questions (kind, question, call) while the lists that came first are answered; return their results."""
    answers = Answers()

    async def run(threads: ThreadPoolExecutor) -> list[Any]:
        lists = QuestionLists(threads, most_characters=most_characters)

        def submit(kind: str, question: str, call: Call) -> asyncio.Future[str]:
            return lists.submit(kind, answers, (question, "text"), call, at_once=lambda: at_once)

        first = [submit("a", f"first {n}", in_time()) for n in range(at_once)]
        futures = [submit(*each) for each in questions]
        wait()
        answers.go.set()
        assert await asyncio.gather(*first) == [f"FIRST {n}" for n in range(at_once)]
        results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 10)
        assert not lists._waiting
        assert not lists._running
        return results

    with ThreadPoolExecutor(8) as threads:
        return answers, asyncio.run(run(threads))


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_questions_that_wait_are_answered_together(at_once: int) -> None:
    questions = [("a", f"question {number}", in_time()) for number in range(MOST_QUESTIONS + 2)]
    answers, results = answer_behind_others(questions, at_once=at_once)
    assert results == [question.upper() for _, question, _ in questions]
    first, later = answers.lists[:at_once], answers.lists[at_once:]
    assert first == [[f"first {n}"] for n in range(at_once)], "fewer lists than may be answered, and questions wait"
    assert sorted(map(len, later)) == [2, MOST_QUESTIONS]


def test_a_list_has_questions_of_one_kind_and_not_too_many_characters() -> None:
    questions = [(kind, f"{kind}{number}", in_time()) for number in range(4) for kind in "ab"]
    answers, results = answer_behind_others(questions, most_characters=15)
    assert results == [question.upper() for _, question, _ in questions]
    assert all(len({question[0] for question in each}) == 1 for each in answers.lists)
    assert max(map(len, answers.lists)) == 2  # of six characters each


def test_only_the_question_at_fault_fails() -> None:
    answers, results = answer_behind_others([("a", question, in_time()) for question in ("good", "bad", "also good")])
    assert [results[0], results[2]] == ["GOOD", "ALSO GOOD"]
    assert str(results[1]) == "bad: expected another question."
    assert ["good", "bad", "also good"] in answers.lists
    assert ["bad"] in answers.lists


def test_expired_and_abandoned_questions_are_not_answered() -> None:
    expired, abandoned = in_time(0.0), in_time()

    def leave() -> None:
        abandoned.abandoned = True

    calls = {"late": expired, "left": abandoned, "there": in_time()}
    answers, results = answer_behind_others([("a", question, call) for question, call in calls.items()], wait=leave)
    assert isinstance(results[0], TimedOutError)
    assert isinstance(results[1], AbandonedError)
    assert results[2] == "THERE"
    assert ["there"] in answers.lists
    assert calls["there"].queued > 0


def test_a_question_that_nobody_waits_for_any_more_disturbs_nobody() -> None:
    async def run(threads: ThreadPoolExecutor) -> Any:
        answers = Answers()
        lists = QuestionLists(threads, most_characters=1000)
        futures = [
            lists.submit("a", answers, (f"first {number}", "text"), in_time(), at_once=lambda: 2) for number in range(5)
        ]
        futures[3].cancel()
        answers.go.set()
        return await asyncio.gather(*futures, return_exceptions=True)

    with ThreadPoolExecutor(8) as threads:
        results = asyncio.run(run(threads))
    assert isinstance(results.pop(3), asyncio.CancelledError)
    assert results == ["FIRST 0", "FIRST 1", "FIRST 2", "FIRST 4"]


def test_questions_are_not_left_waiting_if_a_list_comes_back_broken() -> None:
    answers, results = answer_behind_others([("a", question, in_time()) for question in ("good", "lost", "good")])
    assert [results[0], results[2]] == ["GOOD", "GOOD"]
    assert isinstance(results[1], ValueError)
    assert ["lost"] in answers.lists


@pytest.mark.parametrize("pair", [("who?", "x" * LONG), (" ", "text"), ("who?", ["", "\n"])])
def test_long_and_blank_questions_are_answered_alone(pair: Pair) -> None:
    async def run(threads: ThreadPoolExecutor) -> list[int]:
        lists, sizes = QuestionLists(threads, most_characters=10 * LONG), []

        def answer(pairs: Sequence[Pair]) -> list[None]:
            sizes.append(len(pairs))
            return [None] * len(pairs)

        await asyncio.gather(*(lists.submit("a", answer, pair, in_time(), at_once=1) for _ in range(6)))
        return sizes

    with ThreadPoolExecutor(1) as threads:
        assert asyncio.run(run(threads)) == [1] * 6


@pytest.mark.parametrize("order", ["late left", "left late"])
def test_each_question_of_a_list_that_ends_early_has_its_own_error(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"late": in_time(), "left": in_time()}
    answer = Answers.__call__

    def end_early(answers: Answers, pairs: Sequence[Pair]) -> list[str]:
        if len(pairs) == len(calls):  # both have been taken, and nobody waits any more
            calls["late"].deadline, calls["left"].abandoned = 0.0, True
            call = CALL.get()
            assert call is not None
            call.check()
        return answer(answers, pairs)

    monkeypatch.setattr(Answers, "__call__", end_early)
    _, results = answer_behind_others([("a", question, calls[question]) for question in order.split()])
    kinds = {"late": TimedOutError, "left": AbandonedError}
    assert [type(error) for error in results] == [kinds[question] for question in order.split()]


def test_a_joint_call_goes_on_while_anyone_waits() -> None:
    calls = [in_time(0.0), in_time(5), in_time(1)]
    joint = JointCall(calls)
    assert joint.deadline == calls[1].deadline
    joint.check()
    joint.note_run(1.0, 2.0, 4.0)
    assert [(call.queued, call.computing) for call in calls] == [(1.0, 2.0)] * 3
    calls[1].abandoned = calls[2].abandoned = True
    with pytest.raises(RefusedError):
        joint.check()


# With readers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    encoder = save_tiny_bert(folder / "encoder")
    for seed, name in enumerate(("a", "b")):
        save_tiny_reader(folder / "models" / name, encoder, seed=seed)
    shutil.copytree(folder / "models/a", folder / "first")
    return folder


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    service = Service(Settings(models=(str(folder / "first"),), folder=folder / "models", max_tokens=1000))
    service.start()
    yield service
    service.close()


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, AskOptions, list[str]]]:
    """Note what is answered together: the reader, the options, and the questions."""
    found: list[tuple[str, AskOptions, list[str]]] = []
    answer = AskOptions.answer

    def note(options: AskOptions, loaded: LoadedReader, pairs: Sequence[Pair], *more: Any) -> Any:
        found.append((loaded.listed.name, options, [question for question, _ in pairs]))
        return answer(options, loaded, pairs, *more)

    monkeypatch.setattr(AskOptions, "answer", note)
    return found


def ask_all(service: Service, asks: Sequence[Ask]) -> list[Any]:
    async def run() -> list[Any]:
        return await asyncio.gather(*(service.ask(ask, service.new_call()) for ask in asks), return_exceptions=True)

    return asyncio.run(run())


def test_every_answer_is_that_of_the_reader_alone(service: Service, folder: Path, lists: list[Any]) -> None:
    readers = {name: Reader.load(folder / "models" / name) for name in "ab"}
    options: list[dict[str, Any]] = [{}, {"top_k": 3}, {"threshold": 100.0}, {"max_answer_length": 2}]
    texts = [TEXT.format(number) * (1 + number % 3) for number in range(24)]
    contexts: list[Any] = [text if number % 5 else [text, texts[0]] for number, text in enumerate(texts)]
    asks = [
        Ask(question=f"Who found moon {number}?", context=context, model=["a", "b"], **options[number % 4])
        for number, context in enumerate(contexts)
    ]
    replies = ask_all(service, asks)
    for number, (ask, reply) in enumerate(zip(asks, replies, strict=True)):
        for name, result in zip("ab", reply["results"], strict=True):
            expected = readers[name].ask(ask.question, ask.context, **options[number % 4]).to_json()
            assert result["model"] == name
            assert result["no_answer"] == expected["no_answer"]
            assert result["null_score"] == pytest.approx(expected["null_score"], abs=1e-4)
            for found, wanted in zip(result["answers"], expected["answers"], strict=True):
                assert found == {
                    **wanted,
                    **{key: pytest.approx(wanted[key], abs=1e-4) for key in ("score", "probability")},
                }
    assert max(len(questions) for _, _, questions in lists) > 1
    for _, shared, questions in lists:
        assert {AskOptions.of(ask) for ask in asks if ask.question in questions} == {shared}


def test_hugging_face_answers_are_those_of_the_reader_alone(service: Service, folder: Path) -> None:
    reader = Reader.load(folder / "models/a")
    asks = [{"question": "Who found Titan?", "context": TEXT.format(number)} for number in range(8)]

    async def run() -> list[Any]:
        bodies = [
            HuggingFaceAsk.model_validate({"inputs": ask, "parameters": {"top_k": 1 + n % 2}})
            for n, ask in enumerate(asks)
        ]
        return await asyncio.gather(*(service.ask_as_pipeline("a", body, service.new_call()) for body in bodies))

    for number, (ask, found) in enumerate(zip(asks, asyncio.run(run()), strict=True)):
        expected = reader(**ask, top_k=1 + number % 2)
        found, expected = ([each] if isinstance(each, dict) else each for each in (found, expected))
        assert found == [{**answer, "score": pytest.approx(answer["score"], abs=1e-5)} for answer in expected]


def test_limits_and_warnings_are_those_of_each_question(service: Service) -> None:
    good = [Ask(question=f"Who found moon {number}?", context=TEXT.format(number)) for number in range(9)]
    blank, long = Ask(question=" ", context="Titan."), Ask(question="Who?", context="Titan is a moon. " * 400)
    cut = Ask(question="Who found it? " * 30, context=TEXT.format(0))
    replies = ask_all(service, [*good[:4], blank, *good[4:6], long, cut, *good[6:]])
    assert isinstance(replies[4], UsageError)
    assert "1,000 tokens" in str(replies[7])
    assert [len(reply["results"][0].get("warnings", [])) for reply in replies if isinstance(reply, dict)] == [
        *[0] * 6, 1, *[0] * 3
    ]  # fmt: skip


def test_a_list_with_warnings_is_computed_once(service: Service, lists: list[Any]) -> None:
    asks = [
        Ask(question=f"Who found moon {number}? " * (30 if number % 4 == 0 else 1), context=TEXT.format(number))
        for number in range(12)
    ]
    replies = ask_all(service, asks)
    warned = [bool(reply["results"][0].get("warnings")) for reply in replies]
    assert warned == [number % 4 == 0 for number in range(12)]
    assert len(lists) < len(asks)
    assert sum(len(questions) for _, _, questions in lists) == len(asks)


def test_lists_of_several_readers_meet_in_one_batch(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_all(service, [Ask(question="Who?", context="Titan.", model=["first", "a", "b"])])
    batcher, mixed = service.pool._shared, []
    at_once = batcher.engine.pace.lists
    run, end = batcher.engine.run, perf_counter() + 10

    def note(rows: Any) -> Any:
        while not mixed and len(rows) + batcher.waiting < 1 + 2 * at_once:  # all lists of "a" and "b" that may begin
            assert perf_counter() < end
            threading.Event().wait(0.005)
        mixed.append(len({id(row.delta) for row in rows}))
        return run(rows)

    monkeypatch.setattr(batcher.engine, "run", note)
    asks = [Ask(question="Who?", context=TEXT.format(number), model="ab"[number % 2]) for number in range(12)]
    replies = ask_all(service, [Ask(question="Who?", context="Titan.", model="first"), *asks])
    assert all(isinstance(reply, dict) for reply in replies)
    assert max(mixed[:2]) > 1


@pytest.mark.parametrize("cores", [2, 20])
def test_a_question_with_many_windows_leaves_room_for_others(
    service: Service, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr("lamella.serve.reader_pool.usable_cores", lambda: cores)
    batcher, windows = service.pool._shared, []
    compute = batcher.logits
    enough = batcher.engine.pace.windows
    assert enough is not None, "this test is about a CPU"
    most = max(enough, cores)

    def note(rows: Any) -> Any:
        windows.append(len(rows))
        return compute(rows)

    monkeypatch.setattr(batcher, "logits", note)
    (reply,) = ask_all(service, [Ask(question="Who?", context=["Titan is a moon."] * 50, model="a")])
    assert isinstance(reply, dict)
    assert sum(windows) > most
    assert max(windows) == most


def test_a_long_batch_does_not_delay_a_single_question(service: Service, lists: list[Any]) -> None:
    asks = [Ask(question=f"Who found moon {number}?", context=TEXT.format(number)) for number in range(120)]

    async def run() -> int:
        batch = service.batch(asks, [service.new_call() for _ in asks])
        before = [await anext(batch) for _ in range(4)]
        single = asyncio.ensure_future(service.ask(Ask(question="Alone?", context=TEXT), service.new_call()))
        async for answer in batch:
            before.append(answer)
            if single.done():
                break
        await batch.aclose()
        await single
        return len(before)

    assert asyncio.run(run()) < 60
    assert [questions for *_, questions in lists if "Alone?" in questions] == [["Alone?"]]


def test_a_thread_answers_for_no_request_when_it_is_done(service: Service) -> None:
    ask_all(service, [Ask(question="Who?", context="Titan.")] * 4)
    assert [service._threads.submit(CALL.get).result() for _ in range(4)] == [None] * 4


def test_once_a_reader_is_loaded_as_many_lists_are_answered_as_it_takes() -> None:
    """The first question loads it; until then one list is answered at a time. The next two must meet."""
    paces, loaded, meet = [1], threading.Event(), threading.Barrier(2)

    def answer(pairs: Sequence[Pair]) -> list[str]:
        if pairs[0][0] == "first":
            assert loaded.wait(10)
        else:
            meet.wait(10)
        return [question for question, _ in pairs]

    async def run(threads: ThreadPoolExecutor) -> list[str]:
        lists = QuestionLists(threads, most_characters=1000)
        questions = ["first", *("a" * 600, "b" * 600)]  # one list each
        futures = [
            lists.submit("a", answer, (question, "text"), in_time(), at_once=lambda: paces[-1])
            for question in questions
        ]
        paces.append(2)
        loaded.set()
        return await asyncio.gather(*futures)

    with ThreadPoolExecutor(8) as threads:
        assert len(asyncio.run(run(threads))) == 3
