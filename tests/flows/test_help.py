"""The help texts and the start: nothing is cut, every command is listed, shells can complete, Ctrl-C is quiet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import typer

from lamella.cli import app
from lamella.cli.app import COMMANDS


def help_text(*arguments: str) -> str:
    environment = {**os.environ, "COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    command = [sys.executable, "-m", "lamella", *arguments, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_every_summary_fits_into_a_line_of_80_columns() -> None:
    listing = help_text().partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listing] == list(COMMANDS)
    assert all(len(line) <= 80 and line.endswith(".") and not line.endswith("...") for line in listing)


def test_every_command_is_in_the_order_of_the_help() -> None:
    assert {command.callback.__name__ for command in app.registered_commands if command.callback} == set(COMMANDS)


def test_a_command_without_a_place_in_the_order_is_listed_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["lamella.cli.app"], "COMMANDS", COMMANDS[1:])
    group = typer.main.get_command(app)
    with pytest.raises(SystemExit):
        group(["--help"], prog_name="lamella")
    listing = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listing] == [*COMMANDS[1:], COMMANDS[0]]


def test_completion_is_available_and_not_listed() -> None:
    assert "completion" not in help_text()
    environment = {**os.environ, "_LAMELLA_COMPLETE": "complete_bash", "COMP_WORDS": "lamella ca", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "lamella"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert completed.stdout.split() == ["calibrate"]
    shown = subprocess.run(
        [*command, "--show-completion", "bash"], capture_output=True, text=True, check=False,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )  # fmt: skip
    assert "_LAMELLA_COMPLETE=complete_bash" in shown.stdout


def test_ctrl_c_during_the_start_shows_no_traceback() -> None:
    interrupt = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from lamella.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", interrupt], capture_output=True, text=True, check=False)
    # Python ends itself by the signal, after it was handled, if it came while a string was executed.
    assert ended.returncode in (130, -signal.SIGINT)
    assert ended.stderr == ""
