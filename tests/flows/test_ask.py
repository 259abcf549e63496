"""The command `ask`: questions of a file, at a prompt and from a pipe; answers in their sentences; long texts."""

from __future__ import annotations

import gzip
import io
import json
import os
import pty
import re
import select
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forks import ForkServer
from lamella import progress
from lamella.cli import ask_command
from lamella.documents.file_text import text_of_file
from lamella.documents.text_process import TextProcess
from lamella.inference import reader as reader_module
from samples import needs_torch

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")

TITAN = "In 1655 Christiaan Huygens discovered Titan. J. Comas Solà saw its air in 1907! It rains there."
QUESTIONS = ["Who discovered Titan?", "When was Titan discovered?"]
ANSWERS = ["Christiaan Huygens", "1655"]


@pytest.fixture(autouse=True)
def titan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("titan.txt").write_text(TITAN, encoding="utf-8")
    Path("questions.txt").write_text(f"\n{QUESTIONS[0]}\n  {QUESTIONS[1]}  \n\n", encoding="utf-8")


def test_an_answer_is_shown_in_its_sentence(lamella: Any) -> None:
    code, out, err = lamella("ask", "When was the air of Titan seen?", "-c", "titan.txt")
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert re.fullmatch(r"1907  \[0\.\d\d, characters 74-78\]", first)
    assert second == "  J. Comas Solà saw its air in [1907]!"
    out = lamella("ask", QUESTIONS[1], "-c", "titan.txt", "-t", "Nothing.")[1]
    assert out.splitlines()[1] == "  In [1655] Christiaan Huygens discovered Titan."


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("moons.txt", b"Moons.\r\n\r\nTitan was discovered\r\nby Christiaan Huygens in 1655.\r\n"),
        (
            "moons.html",
            b"<h1>Moons</h1>\r\n<p>Titan was discovered by Christiaan Huygens.</p><pre>Rhea is\r\na moon.</pre>",
        ),
        (
            "declared.html",
            b'<meta charset="windows-1252"><p>At a caf\xe9 \x96 Titan was discovered by Christiaan Huygens.</p>',
        ),
    ],
)
def test_places_are_the_same_however_a_file_is_read(name: str, content: bytes, lamella: Any) -> None:
    Path(name).write_bytes(content)
    answers = []
    for option in ("--context", "--in"):
        code, out, _ = lamella("ask", QUESTIONS[0], option, name, "--json")
        assert code == 0
        answers.append(json.loads(out)["answers"][0])
    assert answers[0]["answer"] == ANSWERS[0]
    assert answers[0].items() <= answers[1].items()
    with TextProcess() as process:
        served = text_of_file(content, name, process=process, most_bytes=1000, most_characters=1000).text
    assert served[answers[0]["start"] : answers[0]["end"]] == ANSWERS[0]
    assert lamella("ask", QUESTIONS[0], "-c", name)[1].splitlines()[1] == f"  {answers[1]['sentence']}".replace(
        ANSWERS[0], f"[{ANSWERS[0]}]"
    )


def test_the_markup_of_a_markdown_file_is_not_read(lamella: Any) -> None:
    text = "# Moons\n\n*Titan* was discovered by **Christiaan Huygens** in `1655`.\n"
    for name in ("moons.md", "moons.txt"):
        Path(name).write_text(text)
    answers = []
    for option in (("--context", "moons.md"), ("--in", "moons.md"), ("--context", "moons.txt")):
        found = json.loads(lamella("ask", QUESTIONS[0], *option, "--json")[1])["answers"][0]
        assert text[found["start"] : found["end"]] == found["answer"] == ANSWERS[0]
        answers.append(found["probability"])
    assert answers[0] == answers[1] != answers[2]


def test_an_answer_is_one_line_without_control_characters(lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_command, "LONGEST_ANSWER", 10)
    text = "In 1655 Christiaan\nHuygens discovered \x1b[31mTitan."
    first, second = lamella("ask", QUESTIONS[0], "-t", text, "--threshold", 1000)[1].splitlines()
    assert first.startswith("Chris … ygens  [0.")
    assert second == "  In 1655 [Chris … ygens] discovered \ufffd[31mTitan."
    record = json.loads(lamella("ask", QUESTIONS[0], "-t", text, "--threshold", 1000, "--json")[1])
    assert record["answers"][0]["answer"] == "Christiaan\nHuygens"


def test_the_questions_of_a_file(lamella: Any) -> None:
    code, out, err = lamella("ask", "--questions", "questions.txt", "-c", "titan.txt")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [lines[0], lines[3], lines[4]] == [QUESTIONS[0], "", QUESTIONS[1]]
    assert [lines[1].split("  ")[0], lines[5].split("  ")[0]] == ANSWERS
    assert len(lines) == 7
    code, out, err = lamella("ask", "--questions", "questions.txt", "-c", "titan.txt", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["question"] for record in records] == QUESTIONS
    assert [record["answers"][0]["answer"] for record in records] == ANSWERS


def test_an_interrupt_keeps_the_answers_so_far(lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(reader_module.Reader):
        def ask(self, question: Any, *arguments: Any, **options: Any) -> Any:
            if question[0] == "Why?":
                raise KeyboardInterrupt
            return super().ask(question, *arguments, **options)

    monkeypatch.setattr(ask_command, "QUESTIONS_AT_ONCE", 2)
    monkeypatch.setattr(reader_module, "Reader", Interrupted)
    Path("questions.txt").write_text("\n".join([*QUESTIONS, QUESTIONS[0], "Where?", "Why?"]))
    code, out, err = lamella("ask", "--questions", "questions.txt", "-c", "titan.txt")
    assert (code, err) == (130, "")
    lines = [line.split("  ")[0] for line in out.splitlines() if not line.startswith("  ")]
    assert lines[:6] == [QUESTIONS[0], ANSWERS[0], "", QUESTIONS[1], ANSWERS[1], ""]
    assert [line for line in lines if line.endswith("?")] == [*QUESTIONS, QUESTIONS[0], "Where?"]


def test_a_line_about_many_questions_is_printed_once(lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_command, "QUESTIONS_AT_ONCE", 1)
    Path("titan.txt").write_text("\n\n".join([TITAN] * 40), encoding="utf-8")
    err = lamella("ask", "--questions", "questions.txt", "-c", "titan.txt", "--passages", 1)[2]
    assert err.count("reading the best 1 of") == err.count("\n") == 1


def test_options_of_a_call(lamella: Any) -> None:
    call = ("ask", QUESTIONS[0], "-c", "titan.txt")
    assert lamella(*call, "--threshold", -1000)[1].startswith("(no answer)  [")
    answer = lamella(*call, "--max-answer-length", 1, "--threshold", 1000)[1].split("  ")[0]
    assert answer in "Christiaan Huygens"
    assert " " not in answer


def test_the_number_format_is_chosen(lamella: Any) -> None:
    call = ("ask", QUESTIONS[0], "-c", "titan.txt", "--json")
    plain, fp32, int8 = (
        json.loads(lamella(*call, *precision)[1])
        for precision in ((), ("--precision", "fp32"), ("--precision", "int8"))
    )
    assert plain == fp32
    assert int8["answers"][0]["answer"] == ANSWERS[0]
    assert int8["null_score"] == pytest.approx(fp32["null_score"], abs=1)
    assert int8["null_score"] != fp32["null_score"]
    code, out, err = lamella(*call, "--precision", "int4")
    assert (code, out) == (2, "")
    assert "'--precision': 'int4' is not one of 'auto', 'fp32', 'bf16', 'fp16', 'int8'" in err


@needs_torch
def test_the_layers_of_an_answer(lamella: Any) -> None:
    call = ("ask", QUESTIONS[0], "-c", "titan.txt", "--layers")
    code, out, err = lamella(*call)
    assert (code, err) == (0, "")
    # `default` reads the last of its six layers alone.
    assert out.splitlines()[2:] == ["  layers of the start: 6 (1.00)", "  layers of the end: 6 (1.00)"]
    (answer,) = json.loads(lamella(*call, "--json")[1])["answers"]
    assert "".join(token["token"] for token in answer["layers"]["tokens"]) == "ChristiaanHuygens"
    assert answer["layers"]["layers"] == [6]


def test_a_withheld_answer_is_printed_as_the_best_guess(lamella: Any) -> None:
    call = ("ask", QUESTIONS[0], "-c", "titan.txt", "--threshold", -1000)
    first, second, third = lamella(*call)[1].splitlines()
    assert re.fullmatch(r"\(no answer\)  \[0\.\d\d, not in the text\]", first)
    likelier = "best guess, likelier but below the threshold: Christiaan Huygens"
    assert re.fullmatch(likelier + r"  \[0\.\d\d, characters 8-26\]", second)
    assert third == "  In 1655 [Christiaan Huygens] discovered Titan."
    lines = lamella(*call, "-t", "Nothing.")[1].splitlines()
    assert lines[1].startswith(f"{likelier}  [0.")
    assert "titan.txt, characters 8-26" in lines[1]
    assert lamella("ask", QUESTIONS[0], "-t", "Nothing.")[1].splitlines()[1].startswith("best guess: ")
    assert not any("best guess" in line for line in lamella(*call, "--top-k", 2)[1].splitlines())
    record = json.loads(lamella(*call, "-t", "Nothing.", "--json")[1])
    assert record["no_answer"] is True
    assert (record["best_guess"]["answer"], record["best_guess"]["file"]) == (ANSWERS[0], "titan.txt")
    assert 0 < record["best_guess"]["probability"] < 1


def test_how_eager_to_answer(lamella: Any) -> None:
    call = ("ask", "Who painted Titan?", "-c", "titan.txt", "--json")
    found = {how: json.loads(lamella(*call, *how)[1]) for how in ((), ("--answer", "eager"), ("--answer", "strict"))}
    usual, eager, strict = (record["na_prob"] for record in found.values())
    assert eager < usual < strict
    odds = [p / (1 - p) for p in (eager, strict)]
    assert odds[1] / odds[0] == pytest.approx(27)  # 90 % and 25 %: odds of 9 and 1/3
    code, out, err = lamella("ask", "Who?", "-c", "titan.txt", "--answer", "strict", "--threshold", 1)
    assert (code, out) == (2, "")
    assert "expected threshold or answerable, got both" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Who?", "--questions", "questions.txt", "-c", "titan.txt"], "expected QUESTION or --questions, got both"),
        (["--questions", "nowhere.txt", "-c", "titan.txt"], "ask --questions 'nowhere.txt': cannot be read"),
        (["--questions", "empty.txt", "-c", "titan.txt"], "expected one question per line, found none"),
        (["-c", "-"], "standard input can be read only once"),
        (["--questions", "-", "-c", "-"], "standard input can be read only once"),
        (["Who?", "-c", "titan.txt", "--passages", "some"], "--passages: expected a number of at least 1, auto or all"),
        ([], "give --in DIR, --context FILE (- for standard input) or --text TEXT."),
        (["Who?", "When?", "-c", "titan.txt"], "put the question in quotes, or ask several with --questions FILE."),
        (["Who?", "-c", "x.pdf"], "ask --context x.pdf: expected a text or HTML file, got a PDF file; --in reads PDF"),
        (["Who?", "-c", "x.gz"], "got a gzip file; --in reads PDF, docx and gzip files."),
        (["Who?", "-c", "binary.txt"], "ask --context binary.txt: expected a text or HTML file, got binary data"),
    ],
)
def test_mistakes_get_one_line(arguments: list[str], message: str, lamella: Any) -> None:
    Path("empty.txt").write_text(" \n\n")
    Path("x.pdf").write_bytes(b"%PDF-1.7 and more")
    Path("x.gz").write_bytes(gzip.compress(b"A text."))
    Path("binary.txt").write_bytes(b"one\0two three four five six")
    code, out, err = lamella("ask", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_questions_from_a_pipe_are_all_asked_and_blank_lines_skipped(forks: ForkServer) -> None:
    asked = "\n".join(["\ufeff", QUESTIONS[0], " ", "", QUESTIONS[1]])
    code, out, err = forks.run("ask", "-c", "titan.txt", stdin=asked)
    assert (code, err) == (0, "")
    lines = [line.split("  ")[0] for line in out.splitlines() if not line.startswith("  ")]
    assert lines == [QUESTIONS[0], ANSWERS[0], "", QUESTIONS[1], ANSWERS[1]]


def test_a_pipe_without_a_question_is_an_error(lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n  \n"))
    code, out, err = lamella("ask", "-c", "titan.txt")
    assert (code, out) == (2, "")
    assert err == "lamella: ask: expected a question, or one per line on standard input, found none.\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of the locales en_US.UTF-8 and C.UTF-8
def test_a_pipe_in_another_encoding_is_an_error(errors: str, lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = f"{QUESTIONS[0]}\nWer sah die Atmosphäre?\n".encode("latin-1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors=errors))
    code, out, err = lamella("ask", "-c", "titan.txt")
    assert (code, "Atmosph" in out) == (2, False)
    assert err.startswith("lamella: ask: standard input: expected UTF-8 text, got bytes of another encoding; save the ")


class Terminal:
    """A command in a process of its own with a pseudo terminal."""

    def __init__(self, forks: ForkServer, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.command = forks.start(*arguments, terminal=Path(os.ttyname(slave)))
        self.slave, self.shown = slave, ""

    def read_until(self, pattern: str, seconds: float = 120) -> str:
        """Return what was shown since the last call, up to a match."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < end, self.shown
            if select.select([self.master], [], [], 1)[0]:
                try:
                    self.shown += os.read(self.master, 65536).decode()
                except OSError:  # Linux reports the end of the other side like this
                    raise AssertionError(f"ended: {self.shown}") from None
        shown, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return shown

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> int:
        code = self.command.wait()
        for file in (self.master, self.slave):
            os.close(file)
        return code


@pytest.mark.parametrize("end", ["\n", "\x04"], ids=["an empty line", "end of input"])
def test_a_prompt_asks_for_questions_and_loads_once(
    end: str, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal(forks, "ask", "-c", "titan.txt")
    assert "Type a question; an empty line ends." in terminal.read_until(r"\? $")
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        terminal.write(f"{question}\n")
        shown = terminal.read_until(r"discovered Titan\.[^?]*\? $")
        assert f"{answer}  [0." in shown
        assert f"\x1b[1;7m{answer}\x1b[0m" in shown  # bold and reverse in the sentence
    terminal.write(end)
    assert terminal.close() == 0


def test_a_long_text_is_announced_and_read_in_passages(lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    filler = "\n\n".join(f"Mill number {number} ground the grain of winter. " * 25 for number in range(3))
    Path("long.txt").write_text(f"{filler}\n\n{TITAN}\n\n{filler}", encoding="utf-8")
    monkeypatch.setattr(reader_module, "LONG_CONTEXT", 5_000)
    monkeypatch.setattr(reader_module, "PASSAGES_READ", 2)
    code, out, err = lamella("ask", QUESTIONS[0], "-c", "long.txt")
    assert code == 0
    assert re.fullmatch(
        r"[\d,]+ characters: reading the best 2 of 7 passages, ranked by the words of the question "
        r"\(--passages all reads everything\)\n",
        err,
    )
    assert out.startswith(f"Christiaan Huygens  [0.{out.split('[0.')[1][:2]}, characters {len(filler) + 10}-")
    code, whole, err = lamella("ask", QUESTIONS[0], "-c", "long.txt", "--passages", "all")
    assert (code, err) == (0, "")
    assert whole.split("  ")[0] == "Christiaan Huygens"
    out = lamella("ask", QUESTIONS[0], "-c", "long.txt", "--threshold", -1000)[1]
    assert ", not in the 2 passages read]" in out
    out = lamella("ask", QUESTIONS[0], "-c", "long.txt", "--threshold", -1000, "--passages", 1)[1]
    assert ", not in the 1 passage read]" in out


@needs_torch
def test_progress_is_printed_now_and_then_where_there_is_no_terminal(
    lamella: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from doubles import save_tiny_encoder, tiny_run_config
    from lamella.models.base_encoder import load_encoder
    from lamella.models.model import ReaderModel

    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    ReaderModel(load_encoder(str(save_tiny_encoder(Path("tiny").absolute()))), tiny_run_config()).save(Path("reader"))
    Path("long.txt").write_text("Mills ground the grain of winter. " * 1000)
    code, _, err = lamella("ask", QUESTIONS[0], "-c", "long.txt", "-m", "reader", "--passages", "all")
    assert code == 0
    lines = err.splitlines()
    assert len(lines) > 2
    assert all(re.fullmatch(r"answering: \d+ % after \d+ s, about \d+ s left", line) for line in lines)
    shares = [int(line.split()[1]) for line in lines]
    assert shares == sorted(shares)
    assert shares[-1] < 100


def test_progress_lines_are_for_commands_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with progress.progress("answering", 2, lines=True) as advance:
        advance()
    with progress.progress_lines(), progress.progress("training", 2) as advance:
        advance()
    assert capsys.readouterr().err == ""
    with progress.progress_lines(), progress.progress("answering", 4, lines=True) as advance:
        advance(1.0)
        advance(3.0)
    assert capsys.readouterr().err == "answering: 25 % after 0 s, about 0 s left\n"


def test_progress_within_progress_prints_no_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with progress.progress_lines(), progress.progress("asking", 2, lines=True) as advance:
        with progress.progress("answering", 2, lines=True) as advance_part:
            advance_part()
        advance()
    assert capsys.readouterr().err == "asking: 50 % after 0 s, about 0 s left\n"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (150, "2 min"), (7200, "2.0 h")])
def test_durations(seconds: float, text: str) -> None:
    assert progress.describe_seconds(seconds) == text
