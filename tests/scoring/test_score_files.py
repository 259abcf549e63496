"""Files with predictions and their scores: what is read, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamella.data.file_formats.writers import write_submission
from lamella.errors import UnreadableError
from lamella.scoring.score_files import read_na_prob, read_null_odds, read_predictions

ANSWERS = {"q1": 'He said "no", and left.', "q2": "", "q3": "two\nlines"}


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "scores"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_predictions_are_json_or_a_submission(tmp_path: Path, save: Callable[[str], Path]) -> None:
    assert read_predictions(save(json.dumps(ANSWERS))) == ANSWERS
    assert read_predictions(ANSWERS) is ANSWERS
    write_submission(ANSWERS, tmp_path / "submission.csv")
    assert read_predictions(tmp_path / "submission.csv") == ANSWERS
    assert read_predictions(save("id\tanswer\nq1\tHuygens\n")) == {"q1": "Huygens"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "scores: the file is empty."),
        ('{"q1": "a", "q2": "b", "q1": "c"}', "scores: expected every key once, got 'q1' more than once; remove"),
        ("Id,Predicted\nq1,a\nq2,b\nq1,c\n", "scores:4: expected every id once, got 'q1' more than once."),
        ("Id,Predicted\nq1,yes, it is\n", "scores:2: expected 2 cells as in the header, got 3 cells; quote texts"),
        ('Id,Predicted\nq1,"yes\n', "scores:2: expected 2 cells as in the header, got broken quotes"),
        ("Id,Score\nq1,0.5\n", "or CSV with the columns Id and Predicted, got text that begins with 'Id,Score"),
        ("some text", "got text that begins with 'some text'."),
        ('[{"id": "q1"}]', "scores: expected a JSON object {question id: value}, got [{'id': 'q1'}]."),
        ('{"version": "v2.0", "data": []}', "got a data file with questions."),
        ('{"q1": ', "scores:1:8: broken JSON"),
    ],
)
def test_predictions_that_cannot_be_read(text: str, message: str, save: Callable[[str], Path]) -> None:
    with pytest.raises(UnreadableError) as error:
        read_predictions(save(text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [2.0, -0.1, float("nan"), float("inf"), 10**308])
def test_a_probability_is_from_0_to_1(value: float, save: Callable[[str], Path]) -> None:
    path = save(json.dumps({"q1": 0, "q2": 1.0, "q3": value}))
    with pytest.raises(UnreadableError) as error:
        read_na_prob(path)
    assert str(error.value).startswith(
        f"{path}: question 'q3': expected a probability from 0 to 1, got {value!r}"[: len(str(path)) + 100]
    )
    assert len(str(error.value)) < len(str(path)) + 250
    assert read_null_odds(path).keys() == {"q1", "q2", "q3"}


@pytest.mark.parametrize("read", [read_null_odds, read_na_prob])
def test_an_id_with_two_scores_is_refused(read: Any, save: Callable[[str], Path]) -> None:
    assert read(save('{"q1": 0.5}')) == {"q1": 0.5}
    with pytest.raises(UnreadableError, match="expected every key once, got 'q1' more than once"):
        read(save('{"q1": 0.5, "q1": 0.25}'))


def test_a_folder_is_not_a_predictions_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"got a folder; a run holds it as predictions\.json\.$"):
        read_predictions(tmp_path)
    (tmp_path / "predictions.json").write_text("{}")
    with pytest.raises(UnreadableError, match=rf"got a folder; give {re.escape(str(tmp_path))}.predictions\.json\.$"):
        read_predictions(tmp_path)
