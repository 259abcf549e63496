"""The errors that a client of the server can meet, each with its HTTP status."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lamella.errors import LamellaError, shorten

MOST_NAMES = 12  # that a message lists


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
        near = difflib.get_close_matches(name[:200], names, n=MOST_NAMES, cutoff=0.4)
        listed = list(dict.fromkeys([*near, *names]))[:MOST_NAMES]
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


def as_refusal(error: LamellaError) -> RefusedError:
    """Return an error as a client sees it: what Lamella refuses is a wrong request."""
    return error if isinstance(error, RefusedError) else RefusedError(str(error))
