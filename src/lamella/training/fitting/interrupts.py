"""Stop training between two steps when the process is asked to stop (Ctrl-C, SIGTERM)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

DEFAULT_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
STOPPING = b"\nStopping; Ctrl-C again stops at once, and then work since the last checkpoint is lost.\n"


class InterruptedTrainingError(KeyboardInterrupt):
    """Training was asked to stop, and stopped where it can be resumed; `exit_code` is the shell's for the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class StopSignals:
    """Holds back SIGINT and SIGTERM until the training loop can stop.

    Only Python's default handlers are replaced, and only in the main thread. In a single process a second signal
    interrupts at once. Several processes wait for one another, and torchrun may send a signal twice, so there further
    signals have no effect.
    """

    def __init__(self, *, single_process: bool = True) -> None:
        self.single_process = single_process
        self.received: int | None = None

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Only note signals inside the block."""
        replaced: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number, handler in DEFAULT_HANDLERS.items():
                if signal.getsignal(number) is handler:
                    replaced[number] = signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)

    def interruption(self, message: str) -> InterruptedTrainingError:
        """Return the error to raise; a process that another one asked to stop has received no signal itself."""
        return InterruptedTrainingError(message, self.received or signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and self.single_process:
            raise KeyboardInterrupt
        self.received = number
        if number == signal.SIGINT and self.single_process:
            with suppress(OSError):
                if os.isatty(2):
                    os.write(2, STOPPING)  # not print: the signal may have interrupted one
