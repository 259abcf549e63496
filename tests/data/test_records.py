"""Data in memory is loaded and checked like a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella.data.dataset import load_examples
from lamella.data.examples import Answer
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write
from lamella.errors import DataError, LamellaError, UnreadableError, UsageError

TITAN = "Huygens discovered Titan in 1655."


def row(**changes: Any) -> dict[str, Any]:
    answers = [{"text": "Huygens", "answer_start": 0}]
    return {"id": "t1", "question": "Who discovered Titan?", "context": TITAN, "answers": answers} | changes


class DataFrame:
    """The part of a pandas DataFrame that is used; iterating gives the column names."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def to_dict(self, orient: str = "dict") -> Any:
        assert orient == "records"
        return self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows[0])


class Dataset:
    """The part of a `datasets.Dataset` that is used; its `to_dict` gives columns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def to_dict(self, batch_size: int | None = None) -> Any:
        raise AssertionError("columns are of no use")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


class NAType:
    """The missing value of pandas, by its name."""


def test_records_are_read_like_a_file(tmp_path: Path) -> None:
    rows = [row(), row(id="t2", question="Who landed on it?", answers=[])]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    from_file, from_records = load_examples(path), load_examples(rows)
    assert [
        (example.id, example.question, example.context.text, example.answers) for example in from_records.examples
    ] == [(example.id, example.question, example.context.text, example.answers) for example in from_file.examples]
    assert from_records.files[0].path == "<records>"
    assert load_examples(rows, name="<dev>").files[0].path == "<dev>"


@pytest.mark.parametrize("make", [list, tuple, iter, Dataset, DataFrame])
def test_the_ways_to_pass_records(make: Any) -> None:
    (example,) = load_examples(make([row()])).examples
    assert (example.id, example.answers) == ("t1", (Answer("Huygens", 0),))


@pytest.mark.parametrize("make", [list, Dataset, DataFrame])
@pytest.mark.parametrize("array", [list, tuple, np.array])
def test_the_layout_of_hugging_face(make: Any, array: Any) -> None:
    rows = [
        row(answers={"text": array(["Huygens"]), "answer_start": array([0])}, title="Titan"),
        row(id="t2", answers={"text": array([]), "answer_start": array([])}, title="Titan"),
    ]
    first, second = load_examples(make(rows), labelled=True).examples
    assert (first.answers, second.answers) == ((Answer("Huygens", 0),), ())
    assert first.context is second.context


def test_a_nested_dictionary(tmp_path: Path) -> None:
    document = json.loads(Path("src/lamella/data/demo/dev.json").read_text(encoding="utf-8"))
    loaded = load_examples(document)
    assert (loaded.files[0].format, len(loaded.examples)) == ("squad", len(load_examples("demo:dev").examples))
    assert [example.id for example in load_examples(document["data"]).examples] == [
        example.id for example in loaded.examples
    ]


def test_paths(tmp_path: Path) -> None:
    count = len(load_examples("demo:dev").examples)
    write(load_examples([row()]).examples, tmp_path / "more.jsonl")
    assert len(load_examples(["demo:dev"]).examples) == count
    assert len(load_examples(("demo:dev", tmp_path / "more.jsonl")).examples) == count + 1
    assert len(load_examples(iter([tmp_path / "more.jsonl"])).examples) == 1


def test_the_cells_of_a_frame_are_read_like_csv() -> None:
    frame = DataFrame(
        [
            row(id=17, title=math.nan, is_impossible=0.0) | {"Answers ": "Huygens", "answers": None},
            row(id=np.int64(18), answers='[{"text": "1655", "answer_start": 28}]', is_impossible=NAType()),
            row(id="19", answers=math.nan, is_impossible=np.bool_(True)),
        ]
    )
    frame.rows[0].pop("answers")
    loaded = load_examples(frame, labelled=True)
    assert [example.id for example in loaded.examples] == ["17", "18", "19"]
    assert [example.answers for example in loaded.examples] == [(Answer("Huygens", 0),), (Answer("1655", 28),), ()]
    assert loaded.files[0].path == "<DataFrame>"


@pytest.mark.parametrize("make", [list, Dataset, DataFrame])
def test_an_answer_text_with_its_offset_beside_it(make: Any) -> None:
    asked = row()
    del asked["answers"]
    rows = [
        asked | {"answer_text": "Huygens", "answer_start": 0},
        asked | {"id": "t2", "answer_text": "1655", "answer_start": 28},
    ]
    assert [example.answers for example in load_examples(make(rows)).examples] == [
        (Answer("Huygens", 0),), (Answer("1655", 28),)
    ]  # fmt: skip
    assert load_examples(make([asked | {"answer": "Titan"}])).examples[0].answers == (Answer("Titan", 19),)


def test_the_answer_columns_of_a_frame_may_be_numbers() -> None:
    asked = row()
    del asked["answers"]
    frame = DataFrame(
        [
            asked | {"answer_text": 1655, "answer_start": np.float64(28)},
            asked | {"id": "t2", "answer_text": math.nan, "answer_start": math.nan},
        ]
    )
    assert [example.answers for example in load_examples(frame).examples] == [(Answer("1655", 28),), ()]


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(UnreadableError, match="<records>: expected records, got a number of thousands of digits"):
        load_examples([row(id=10**5000)])


def test_the_hash_depends_on_the_content_only() -> None:
    hashes = {load_examples(make([row()])).files[0].sha256 for make in (list, tuple, iter, Dataset, DataFrame)}
    assert len(hashes) == 1
    assert hashes != {load_examples([row(id="t2")]).files[0].sha256}
    assert load_examples([dict(reversed(row().items()))]).files[0].sha256 in hashes
    assert load_examples([row()]).files[0].size > 0


def test_errors_are_those_of_a_file_in_one_line() -> None:
    rows = [row(), row(id="t2", answers=[{"text": "Huygens", "answer_start": 3}])]
    with pytest.raises(DataError) as error:
        load_examples(rows)
    message = str(error.value)
    assert message.startswith("<records>: 1 error, the first: <records>: t2: error answer_shifted: ")
    assert message.endswith(
        "[on_bad_answer='fix': Moves it to the nearest occurrence]. Set on_bad_answer to fix or skip."
    )
    assert "\n" not in message
    assert load_examples(rows, on_bad_answer="fix").fixed == 1
    assert [example.id for example in load_examples(rows, on_bad_answer="skip").examples] == ["t1"]
    with pytest.raises(DataError, match=r"^<records>: no usable question is left\.$"):
        load_examples(rows[1:], on_bad_answer="skip")
    with pytest.raises(DataError, match="is_impossible"):
        load_examples([row(answers=None)], labelled=True)
    with pytest.raises(DataError, match=r"\[0\]\.context: expected text, got a value of type bytes"):
        load_examples([row(context=b"x")])
    with pytest.raises(DataError, match="lone_surrogate"):
        load_examples([row(title="\ud83d")])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "got NoneType"),
        (17, "got int"),
        (b"train.json", "got bytes"),
        ([], "got an empty list"),
        (["demo:dev", row()], "got a mixture of both"),
        ({"train": Dataset([row()]), "validation": Dataset([])}, "got a dictionary of 'train', 'validation'"),
        ([{"text": "x"}], "unknown format: got the keys 'text' in its entries"),
        ([1, 2], "got a list without objects"),
    ],
)
def test_what_is_no_data(data: Any, message: str) -> None:
    with pytest.raises(LamellaError, match=message) as error:
        load_examples(data)
    assert "\n" not in str(error.value)


def test_records_without_end_are_refused() -> None:
    endless: dict[str, Any] = row()
    endless["title"] = [endless]
    with pytest.raises(LamellaError, match="<records>: expected records, got values nested too deeply"):
        load_examples([endless])


def test_usage_errors_name_what_is_expected() -> None:
    with pytest.raises(UsageError, match="expected a path, several paths, a list of dictionaries, a DataFrame or a"):
        load_examples(17)  # type: ignore[arg-type]


def test_the_caller_s_objects_stay_as_they_are() -> None:
    rows = [row(title=math.nan)]
    load_examples(rows)
    assert math.isnan(rows[0]["title"])
    assert read("demo:dev").path == "demo:dev"
