"""Commands that are killed and run again, and what must come of it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forks import ForkServer
from kills import changes, prelude
from lamella.atomic import TEMPORARY, remove
from outcomes import outcome

Files = dict[str, bytes]


@dataclass(frozen=True)
class Case:
    """A command that writes into the folder it runs in, and the command that completes it after a kill.

    The command is repeated first. Where it refuses the unfinished folder in one line, `again` completes it.
    """

    command: tuple[str, ...]
    again: tuple[str, ...] = ()
    prepare: Callable[[Path], object] = lambda folder: None
    replaced: str = ""  # the file or folder whose old content must survive until the new one replaces it
    view: Callable[[Path], Files] = outcome  # what of the files must be the same
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Tally:
    """How the kills of a command ended."""

    kills: int = 0
    equal: int = 0  # the same result after the command was repeated
    reported: int = 0  # of these, the folder was reported as unfinished, failed or interrupted first
    losses: list[str] = field(default_factory=list)


class Trial:
    """Runs a case in one folder, as often as it is killed: absolute paths in the results stay the same."""

    def __init__(self, case: Case, folder: Path, forks: ForkServer) -> None:
        self.case, self.folder, self.forks = case, folder, forks
        self.counter, self.tally = folder.with_suffix(".count"), Tally()
        self.prepare()
        self.before = self._replaced()
        started = time.monotonic()
        code, _, err = self._run(case.command)
        assert code == 0, err
        self.seconds = time.monotonic() - started
        self.whole, self.after, self.changes = case.view(folder), self._replaced(), changes(self.counter)
        assert self.changes > 0
        assert not self._left()

    def kill_at(self, change: int) -> None:
        """Kill the command just before a change, and complete it."""
        self.prepare()
        code, _, err = self._run(self.case.command, last=change)
        assert code == -signal.SIGKILL, f"change {change} of {self.changes}: {err}"
        self._complete(f"killed at change {change} of {self.changes}")

    def kill_after(self, seconds: float) -> bool:
        """Kill the command after a time, and complete it; return False if it had ended before."""
        self.prepare()
        process = self.forks.start(*self.case.command, prelude=self._prelude())
        ended = time.monotonic() + seconds
        while time.monotonic() < ended and not process.ended():
            time.sleep(0.001)
        with_signal = process.kill()
        if with_signal:
            self._complete(f"killed after {seconds:.3f} s, at change {changes(self.counter)} of {self.changes}")
        return with_signal

    def fail(self, spoil: Callable[[], object], repair: Callable[[], object]) -> str:
        """Run the command while something is wrong, put that right and complete it; return the output of a failure."""
        self.prepare()
        spoil()
        code, out, err = self._run(self.case.command)
        repair()
        if code == 0:
            return ""
        assert code in (1, 2), err
        assert err.count("\n") == 1, err
        self._complete(err.strip())
        return f"{out}{err}".strip()

    def refuse_a_second(self, other: ForkServer) -> str:
        """Stop the command in the middle, run it in another process, and let it end; return the other's error."""
        self.prepare()
        first = self.forks.start(*self.case.command, prelude=self._prelude(self.changes // 2, signal.SIGSTOP))
        while not first.stopped():
            time.sleep(0.01)
        try:
            code, _, err = other.run(*(self.case.again or self.case.command), prelude=self._place())
        finally:
            os.kill(first.pid, signal.SIGCONT)
        assert first.wait() == 0, first.err
        assert (code, err.count("\n")) == (1, 1), err
        assert self.case.view(self.folder) == self.whole
        assert not self._left()
        return err

    def random_moments(self, count: int, *, seed: int = 0) -> Iterator[float]:
        dice = random.Random(seed)
        for _ in range(count):
            yield dice.uniform(0.0, 0.95 * self.seconds)

    def _complete(self, moment: str) -> None:
        """Repeat the command, and compare what it wrote with what it writes when it is not killed."""
        self.tally.kills += 1
        if (found := self._replaced()) not in (self.before, self.after):
            self.tally.losses.append(f"{moment}: {self.case.replaced} is neither old nor new: {sorted(found or ())}")
        code, _, err = self._run(self.case.command)
        if code and found is not None and found == self.after != self.before:
            code = 0  # the new folder was complete, and rightly refused to be replaced
        if code and self.case.again:
            if err.count("\n") == 1 and "already holds a run (" in err:
                self.tally.reported += 1
            else:
                self.tally.losses.append(f"{moment}: expected one line about an unfinished run: {err}")
            code, _, err = self._run(self.case.again)
        written = self.case.view(self.folder)
        if code:
            self.tally.losses.append(f"{moment}: not completed: {err}")
        elif written != self.whole:
            different = sorted(name for name in {*written, *self.whole} if written.get(name) != self.whole.get(name))
            self.tally.losses.append(f"{moment}: other files than without a kill: {different}")
        elif left := self._left():
            self.tally.losses.append(f"{moment}: temporary files stayed: {left}")
        else:
            self.tally.equal += 1

    def _run(self, command: tuple[str, ...], *, last: int | None = None) -> tuple[int, str, str]:
        return self.forks.run(*command, prelude=self._prelude(last))

    def _prelude(self, last: int | None = None, number: int = signal.SIGKILL) -> str:
        return f"{self._place()}; {prelude(self.folder, self.counter, last=last, number=number)}"

    def _place(self) -> str:
        """Return the code that brings a process into the folder."""
        environment = dict(self.case.environment)
        return f"import os; os.chdir({str(self.folder)!r}); os.environ.update({environment!r})"

    def prepare(self) -> None:
        """Bring the folder to the state before the command."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():  # the folder itself may be a mounted disk
            remove(path)
        self.case.prepare(self.folder)

    def _replaced(self) -> Files | None:
        path = self.folder / self.case.replaced
        if not self.case.replaced or not path.exists():
            return None
        return {"": path.read_bytes()} if path.is_file() else outcome(path)

    def _left(self) -> list[str]:
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob(f"*{TEMPORARY}")]
