"""The service behind the HTTP API: accepts questions up to a limit, and answers them in threads with a `Reader`."""

from __future__ import annotations

import asyncio
import logging
import math
import unicodedata
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from lamella.decoding_options import DecodingOptions
from lamella.documents.text_process import PROCESS_SECONDS
from lamella.errors import LamellaError, UsageError, counted
from lamella.serve.answering import AskOptions, PipelineOptions
from lamella.serve.body_budget import BodyBudget
from lamella.serve.calls import Call, answering
from lamella.serve.catalogue import Catalogue, Listed
from lamella.serve.question_lists import Pair, QuestionLists
from lamella.serve.reader_pool import LoadedReader, ReaderPool
from lamella.serve.refusals import (
    REQUEST_ID,
    BusyError,
    InternalError,
    RefusedError,
    ShuttingDownError,
    TimedOutError,
    TooLargeError,
    UnknownModelError,
    as_refusal,
)
from lamella.serve.schemas import Ask, HuggingFaceAsk
from lamella.serve.server_metrics import Metrics
from lamella.serve.settings import Settings

T = TypeVar("T")

logger = logging.getLogger("lamella.serve")

GRACE = 0.5  # seconds after the time-out in which a thread may report it itself
LONGEST_RETRY = 60  # seconds
CHARACTERS_PER_TOKEN = 3  # fewer than English has, so that few lists of questions have more tokens than a batch
MANAGERS = 4  # threads that wait for readers to be loaded: one that takes long must not delay the others


def seconds_to_stop(settings: Settings) -> int:
    """Return how long a server may take to finish what it has accepted: questions, and files that it reads."""
    return math.ceil(max(settings.timeout + GRACE, PROCESS_SECONDS) + settings.body_timeout) + 1


class Service:
    """Answers questions. Its coroutines belong to one event loop; the readers run in threads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.catalogue = Catalogue(settings.models, settings.folder)
        self.metrics = Metrics()
        self.pool = ReaderPool(
            settings,
            pinned=self.catalogue.default,
            alone=settings.folder is None and len(self.catalogue.names()) == 1,
            observe=self.metrics.observe_batch,
        )
        self.draining = False  # accepted requests are answered, and new ones are refused
        self.leaving = False  # no new requests should be sent here; those that still come are answered
        self.accepted = 0
        self.metrics.accepted.set_function(lambda: self.accepted)
        self.metrics.loaded.set_function(lambda: len(self.pool))  # readers come and go with the questions
        self._threads = ThreadPoolExecutor(settings.workers, "lamella-serve")
        self._lists = QuestionLists(self._threads, most_characters=CHARACTERS_PER_TOKEN * settings.batch_tokens)
        self.bodies = BodyBudget(settings.body_memory)
        self._management = ThreadPoolExecutor(MANAGERS, "lamella-manage")
        self._mean_seconds = 0.05  # of a request, for Retry-After

    def start(self) -> None:
        """Load the default reader; questions are answered from then on."""
        self.pool.get(self.catalogue.get(None))

    def close(self) -> None:
        """Free all memory; accepted requests must have been answered."""
        for threads in (self._threads, self._management):
            threads.shutdown(wait=True, cancel_futures=True)
        self.pool.close()

    @property
    def ready(self) -> bool:
        """Whether the default reader is in memory and the server is not shutting down."""
        return not self.stopping and self.pool.loaded(self.catalogue.default) is not None

    @property
    def stopping(self) -> bool:
        """Whether the server was asked to stop."""
        return self.draining or self.leaving

    def check_not_stopping(self) -> None:
        """Refuse a request that comes when the server accepts no more."""
        if self.draining:
            raise ShuttingDownError

    # Ask

    def new_call(self) -> Call:
        """Return the record of a request that is accepted now."""
        seconds = self.settings.timeout
        return Call(perf_counter() + seconds, seconds)

    async def ask(self, ask: Ask, call: Call) -> dict[str, Any]:
        """Return the answers of all readers asked, as JSON values."""
        with self._accept():
            return await self._ask(ask, call)

    async def batch(self, asks: Sequence[Ask], calls: Sequence[Call]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answers to several questions as they are finished; an error of one does not stop the others.

        At most a quarter as many questions as there are threads are in work, so that several batches and single
        questions share the server. If the consumer stops, the questions that are being answered are abandoned. If the
        server is asked to stop, those that were not begun get an error: a batch may take longer than it may take to
        stop.
        """
        if self.stopping:
            raise ShuttingDownError
        batch = object()
        for call in calls:
            call.batch = batch
        waiting = list(enumerate(zip(asks, calls, strict=True)))[::-1]
        running: set[asyncio.Task[dict[str, Any]]] = set()

        async def answer(index: int, ask: Ask, call: Call) -> dict[str, Any]:
            call.deadline = perf_counter() + call.seconds_allowed  # its turn comes now
            try:
                return {"index": index, **await self._ask(ask, call)}
            except LamellaError as error:
                return refused(index, as_refusal(error))
            except Exception:
                logger.exception("id=%s: an error of the server in question %d of a batch", REQUEST_ID.get(), index)
                return refused(index, InternalError())

        def refused(index: int, refusal: RefusedError) -> dict[str, Any]:
            return {"index": index, "error": {"type": refusal.kind, "message": str(refusal)}}

        with self._accept():
            try:
                while waiting or running:
                    while waiting and len(running) < max(1, self.settings.workers // 4):
                        index, (ask, call) = waiting.pop()
                        if self.stopping:
                            yield refused(index, ShuttingDownError())
                        else:
                            running.add(asyncio.create_task(answer(index, ask, call)))
                    if not running:
                        break
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
            finally:
                for call in calls:
                    call.abandoned = True
                for task in running:
                    task.cancel()

    async def ask_as_pipeline(self, name: str | None, ask: HuggingFaceAsk, call: Call) -> Any:
        """Return one answer or a list, as the question answering pipeline of transformers 4 does."""
        listed = self.catalogue.get(name)
        self._check_limits(ask.inputs.question, [ask.inputs.context])
        options = PipelineOptions.of(ask.parameters)
        with self._accept():
            answered = await self._answer(listed, options, (ask.inputs.question, ask.inputs.context), call)
        best = answered[:1] if isinstance(answered, list) else [answered]
        self.metrics.observe_question(call.queued, [(listed.name, any(answer["answer"] for answer in best))])
        return answered

    async def _ask(self, ask: Ask, call: Call) -> dict[str, Any]:
        limits = self.settings
        names = ask.model_names
        if not names:
            raise UsageError("model: expected the name of a reader, or a list of names, got an empty list.")
        if len(names) > limits.max_models:
            raise TooLargeError(f"model: expected at most {limits.max_models} readers per question, got {len(names)}.")
        self._check_limits(ask.question, ask.contexts)
        listed = [self.catalogue.get(name) for name in names]
        missing = [each for each in listed if self.pool.loaded(each.name) is None]
        if missing and len(listed) > 1:  # if one cannot be loaded, the others need not compute
            await _all([self._run(partial(self._load, each), call) for each in missing], call)
        options, pair = AskOptions.of(ask), (ask.question, ask.context)
        results = await _all([self._answer(each, options, pair, call) for each in listed], call)
        self.metrics.observe_question(call.queued, [(result["model"], not result["no_answer"]) for result in results])
        return {"question": ask.question, "results": results}

    def _check_limits(self, question: str, contexts: Sequence[str]) -> None:
        limits = self.settings
        if len(question) > limits.max_question:
            raise TooLargeError(
                f"question: expected at most {limits.max_question:,} characters, got {len(question):,}; shorten it."
            )
        if not contexts:
            raise UsageError("context: expected a text, or a list of texts, got an empty list.")
        if len(contexts) > limits.max_contexts:
            raise TooLargeError(
                f"context: expected at most {limits.max_contexts:,} texts per question, got {len(contexts):,}; send "
                "several requests."
            )
        if (characters := sum(map(len, contexts))) > limits.max_characters:
            raise TooLargeError(
                f"context: expected at most {limits.max_characters:,} characters in all, got {characters:,}; send "
                "several requests."
            )
        if any(map(str.strip, contexts)) and all(map(_unreadable, contexts)):  # the reader refuses white space itself
            raise UsageError("context: expected a text, got nothing but white space and invisible characters.")

    async def _answer(self, listed: Listed, options: AskOptions | PipelineOptions, pair: Pair, call: Call) -> Any:
        """Ask one reader, together with other questions that wait for it."""

        def answer(pairs: Sequence[Pair]) -> list[Any]:
            return options.answer(self._load(listed), pairs, self.pool.shown_layers)

        kind = listed, options, call.batch  # a list with questions of a batch would keep others waiting
        waiting = self._lists.submit(
            kind, answer, pair, call, at_once=partial(self._lists_at_once, listed.name), alone=options.alone
        )
        return await _in_time(waiting, call)

    def _lists_at_once(self, name: str) -> int:
        """Return how many lists a reader answers at once; a reader that is not loaded is loaded by the first."""
        loaded = self.pool.loaded(name)
        return 1 if loaded is None else loaded.queue.engine.pace.lists

    def _load(self, listed: Listed) -> LoadedReader:
        try:
            loaded = self.pool.get(listed)
        except LamellaError as error:
            raise _unavailable(listed, error) from None
        if not self.catalogue.serves(listed.name):  # removed while this request waited; its answer is the last
            self.pool.remove(listed.name)
        return loaded

    @contextmanager
    def _accept(self) -> Any:
        """Count a request as accepted, or refuse it if there are too many."""
        if self.accepted >= self.settings.queue:
            seconds = math.ceil(self.accepted * self._mean_seconds / max(1, min(self.settings.workers, self.accepted)))
            raise BusyError(
                f"the server answers {counted(self.accepted, 'request')} already, its limit; try again later.",
                retry_after=min(max(seconds, 1), LONGEST_RETRY),
            )
        self.accepted += 1
        begin = perf_counter()
        try:
            yield
        finally:
            self.accepted -= 1
            self._mean_seconds += 0.05 * (perf_counter() - begin - self._mean_seconds)

    async def _run(self, work: Callable[[], T], call: Call) -> T:
        """Run work in a thread, as part of a request."""
        accepted = perf_counter()

        def run() -> T:
            call.waits.append((accepted, perf_counter()))
            with answering(call):
                return work()

        return await _in_time(asyncio.get_running_loop().run_in_executor(self._threads, run), call)

    # Models

    def describe_models(self) -> list[dict[str, Any]]:
        """Describe all readers, the default first."""
        described = []
        for name in self.catalogue.names():
            with suppress(UnknownModelError):  # removed meanwhile
                described.append(self.describe_model(name))
        return described

    def describe_model(self, name: str) -> dict[str, Any]:
        """Describe a reader."""
        listed = self.catalogue.get(name)
        loaded = self.pool.loaded(name)
        shares, why = self.pool.sharing(listed)
        facts = {
            "name": name,
            "default": name == self.catalogue.default,
            **listed.describe(),
            "loaded": loaded is not None,
            "shares_encoder": shares,
            "calibration": None if loaded is None else _calibration(loaded.reader.model.decoding),
        }
        return {**facts, "why": why} if why else facts

    async def load_model(self, name: str) -> dict[str, Any]:
        """Load a reader from the configured folders, or load it again; requests that use the old one finish."""
        self.check_not_stopping()

        def load() -> dict[str, Any]:
            listed = self.catalogue.find(name)
            try:
                self.pool.replace(listed)
            except LamellaError as error:
                raise _unavailable(listed, error) from None
            self.catalogue.restore(name)
            return self.describe_model(name)

        return await asyncio.get_running_loop().run_in_executor(self._management, load)

    def remove_model(self, name: str) -> None:
        """Serve a reader no longer; its files stay."""
        self.catalogue.get(name)
        if name == self.catalogue.default:
            raise RefusedError(f"model: {name!r} is the default reader, which stays.", status=409, kind="conflict")
        self.catalogue.remove(name)
        self.pool.remove(name)


async def _all(parts: Sequence[Coroutine[Any, Any, T]], call: Call) -> list[T]:
    """Return the results of several parts of a request; if one fails, wait for the others, which stop soon."""
    if len(parts) == 1:
        return [await parts[0]]
    running = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*running)
    except Exception:
        call.abandoned = True
        await asyncio.wait(running)
        raise


async def _in_time(future: asyncio.Future[T], call: Call) -> T:
    """Return a result; raise an error if it takes longer than the request may take."""
    try:
        async with asyncio.timeout(max(0.0, call.deadline - perf_counter()) + GRACE):
            return await future
    except TimeoutError:
        call.abandoned = True
        raise TimedOutError(call.seconds_allowed) from None
    except asyncio.CancelledError:
        call.abandoned = True
        raise


def _unreadable(text: str) -> bool:
    """Return whether no character of a text can be seen: a reader would have no place for an answer."""
    # Most texts are judged by their first characters; a long text without any is judged by its few different ones.
    return all(map(_invisible, text[:100])) and all(map(_invisible, set(text)))


def _invisible(character: str) -> bool:
    return unicodedata.category(character)[0] in "CZ"


def _unavailable(listed: Listed, error: LamellaError) -> RefusedError:
    """Return the error for clients: the reason may name folders of this machine, so it only goes to the log."""
    if isinstance(error, RefusedError):
        return error
    logger.error("model %s cannot be loaded: %s", listed.name, error)
    return RefusedError(
        f"model {listed.name!r}: cannot be loaded; the log of the server has the reason.",
        status=503,
        kind="model_unavailable",
    )


def _calibration(decoding: DecodingOptions) -> dict[str, Any] | None:
    """Return the numbers with which a client can move a decision, without the files they were fitted on."""
    if decoding.calibration is None:
        return None
    return decoding.calibration.model_dump(exclude={"fitted_on", "features"})
