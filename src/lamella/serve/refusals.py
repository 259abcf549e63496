"""The errors that a client of the server can meet, each with its HTTP status."""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Iterable
from contextvars import ContextVar
from itertools import pairwise

from lamella.errors import LamellaError, TooManyTokensError, UsageError, shorten

logger = logging.getLogger("lamella.serve")

FOLDER = re.compile(r"(^|[\s'\"(])(/|~|\w:[\\/])")  # where a path begins
MOST_NAMES = 12  # that a message lists
MOST_COMPARED = 1000  # names that are compared with an unknown one
LONGEST_COMPARED = 60  # characters

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="none")  # of the request that is being answered


class RefusedError(LamellaError):
    """A request that cannot be answered: `kind` is for programs, the message for people."""

    status = 422
    kind = "invalid_request"

    def __init__(
        self, message: str, *, status: int | None = None, kind: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind = status or self.status, kind or self.kind
        self.retry_after = retry_after  # seconds


class UnknownModelError(RefusedError):
    """A model name that is not served."""

    status = 404
    kind = "unknown_model"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = list(known)
        asked = _letter_pairs(name)

        def likeness(other: str) -> float:
            pairs = _letter_pairs(other)
            return len(asked & pairs) / (len(asked) + len(pairs) + 1)

        # This runs between the answers to others, so it must be fast: difflib takes milliseconds per name.
        listed = heapq.nlargest(MOST_NAMES, names[:MOST_COMPARED], key=likeness)
        more = f", and {len(names) - len(listed):,} more (GET /v1/models)" if len(names) > len(listed) else ""
        served = f"this server has {', '.join(listed)}{more}" if names else "this server has none"
        super().__init__(f"model: expected the name of a reader, got {shorten(name)}; {served}.")


class TooLargeError(RefusedError):
    """A request beyond a limit of the server."""

    status = 413
    kind = "too_large"


class BusyError(RefusedError):
    """The queue is full."""

    status = 429
    kind = "busy"


class TimedOutError(RefusedError):
    """A request that took longer than the server allows."""

    status = 503
    kind = "timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"expected an answer within {seconds:g} seconds, and it took longer; try again later, or send shorter "
            "contexts.",
            retry_after=1,
        )


class AbandonedError(RefusedError):
    """A request whose client has left; only the log shows it."""

    status = 499
    kind = "abandoned"

    def __init__(self) -> None:
        super().__init__("the client has closed the connection.")


class ShuttingDownError(RefusedError):
    """A request that was not begun when the server was asked to stop."""

    status = 503
    kind = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the server shuts down, and did not begin this request; send it again later.", retry_after=1)


class InternalError(RefusedError):
    """An error of the server; only the log has the details."""

    status = 500
    kind = "internal_error"

    def __init__(self) -> None:
        super().__init__(f"an error of the server; its log has the details under id {REQUEST_ID.get()}.")


def as_refusal(error: LamellaError) -> RefusedError:
    """Return an error as a client sees it: a wrong call is a wrong request, everything else a fault of the server.

    What a fault is may name folders of this machine, so it only goes to the log.
    """
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, TooManyTokensError):
        return TooLargeError(str(error))
    if isinstance(error, UsageError):
        return RefusedError(str(error))
    logger.error("id=%s: %s", REQUEST_ID.get(), error)
    return RefusedError(
        f"the server cannot do this now; its log has the reason under id {REQUEST_ID.get()}.",
        status=503,
        kind="unavailable",
    )


def names_folder(message: str) -> bool:
    """Whether a message may name a folder of this machine."""
    return FOLDER.search(message) is not None


def _letter_pairs(name: str) -> set[tuple[str, str]]:
    return set(pairwise(name[:LONGEST_COMPARED]))
