"""What signals do once the server has been stopped by force."""

from __future__ import annotations

import signal

import pytest

from lamella.serve.http_server import Server
from lamella.serve.service import Service
from lamella.serve.settings import Settings


@pytest.mark.parametrize("number", [1, 2])
def test_only_a_forced_stop_can_be_interrupted_again(number: int) -> None:
    """After one Ctrl-C, the process ends in order and ignores more; the second forces it, and a third must end it."""
    before = signal.getsignal(signal.SIGINT)
    try:
        server = Server.__new__(Server)
        server._service, server._captured_signals = Service(Settings()), []
        server.should_exit = server.force_exit = False
        with server.capture_signals():
            for _ in range(number):
                signal.raise_signal(signal.SIGINT)
        assert server.force_exit == (number == 2)
        assert signal.getsignal(signal.SIGINT) == (before if number == 2 else signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
