"""Corrections: what is kept is a SQuAD file that the other commands read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lamella.data.dataset import load_examples
from lamella.errors import UsageError
from lamella.serve import corrections as module
from lamella.serve.corrections import Corrections, UnknownCorrectionError
from lamella.serve.refusals import TooLargeError

TEXT = "😀 Huygens discovered Titan in 1655."


def test_answers_and_their_absence_are_kept_in_a_squad_file(
    tmp_path: Path, lamella: Callable[..., tuple[int, str, str]]
) -> None:
    kept = Corrections(tmp_path)
    kept.add("Who discovered Titan?", TEXT[2:], (0, 7))
    kept.add("Who discovered Io?", TEXT[2:], None)
    examples = load_examples(str(kept.path)).examples
    assert [(example.question, [answer.text for answer in example.answers]) for example in examples] == [
        ("Who discovered Titan?", ["Huygens"]),
        ("Who discovered Io?", []),
    ]
    assert examples[0].context is examples[1].context  # one paragraph
    code, out, _ = lamella("check", kept.path)
    assert code == 0, out
    assert json.loads(kept.file())["version"] == "v2.0"


def test_a_second_correction_of_a_question_replaces_the_first(tmp_path: Path) -> None:
    kept = Corrections(tmp_path)
    kept.add("Who?", TEXT, (2, 9))
    second = kept.add(" Who? ", TEXT, None)
    assert kept.listed() == [second]
    assert second["no_answer"]


def test_a_correction_can_be_undone(tmp_path: Path) -> None:
    kept = Corrections(tmp_path)
    first = kept.add("Who?", TEXT, (2, 9))
    second = kept.add("When?", TEXT, (30, 34))
    assert [row["answer"] for row in kept.listed()] == ["1655", "Huygens"]
    kept.remove(second["id"])
    assert kept.listed() == [first]
    kept.remove(first["id"])
    assert not kept.path.exists()
    assert json.loads(kept.file()) == {"version": "v2.0", "data": []}
    with pytest.raises(UnknownCorrectionError, match="expected the id of a correction"):
        kept.remove("../x")


def test_the_last_correction_may_be_removed_while_others_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Corrections(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda _: True)  # as it was before
    assert kept.listed() == []
    assert json.loads(kept.file()) == {"version": "v2.0", "data": []}


@pytest.mark.parametrize("place", [(5, 5), (9, 2), (0, 999), (-1, 4), (1, 2)])
def test_a_place_without_words_is_refused(tmp_path: Path, place: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="expected an answer within the 35 characters"):
        Corrections(tmp_path).add("Who?", TEXT, place)
    assert not (tmp_path / module.FILE).exists()


@pytest.mark.parametrize("place", [0, 5_000, 60_000, 119_000])
def test_of_a_long_text_the_part_around_the_answer_is_kept(tmp_path: Path, place: int) -> None:
    text = "word " * 24_000
    begin = place - place % 5
    text = text[:begin] + "HERE " + text[begin + 5 :]
    kept = Corrections(tmp_path)
    kept.add("Where?", text, (begin, begin + 4))
    kept.add("What?", text, None, near=begin)
    for example in kept.examples():
        assert "HERE" in example.context.text
        assert 15_000 < len(example.context.text) <= module.LONGEST_CONTEXT
        assert set(example.context.text.split()) == {"word", "HERE"}  # cut between words
    assert kept.examples()[0].answers[0].text == "HERE"


def test_corrections_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    """Two servers on one folder take turns; here they are two objects, whose threads share nothing else."""
    from concurrent.futures import ThreadPoolExecutor

    servers = [Corrections(tmp_path), Corrections(tmp_path)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: servers[number % 2].add(f"Question {number}?", TEXT, (2, 9)), range(12)))
    assert len(servers[0].examples()) == 12


def test_long_answers_and_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Corrections(tmp_path)
    text = "word " * 1000
    with pytest.raises(TooLargeError, match="an answer of at most 1,000 characters, got 1,001"):
        kept.add("Who?", text, (0, 1001))
    kept.add("Who?", text, (0, 1000))
    monkeypatch.setattr(module, "MOST_BYTES", 6000)
    with pytest.raises(TooLargeError, match="download the file"):
        kept.add("When?", text, (0, 4))
    assert len(kept.examples()) == 1
