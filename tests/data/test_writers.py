"""Written files are read back unchanged; a failed write leaves no file."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write, write_flat, write_squad, write_submission
from lamella.errors import DataError, LamellaError, UnknownNameError, UsageError

ELBE = Context("The Elbe flows through Dresden. ❤\n", "Elbe")
OSLO = Context("Oslo is by the sea.", "Oslo")
EXAMPLES = [
    Example("1", "Where?", ELBE, (Answer("Dresden", 23), Answer("Dresden", 23), Answer("through Dresden", 15))),
    Example("2", "Whence?", ELBE, (), (Answer("Dresden", 23),)),
    Example("3", "Where?", OSLO, (Answer("by the sea", 8),), group="3"),
    Example("4", "Why?", Context("No title.")),
]


def fields(examples: Sequence[Example]) -> list[Any]:
    return [
        (
            example.id,
            example.question,
            example.context.text,
            example.context.title,
            example.answers,
            example.plausible_answers,
            example.group,
        )
        for example in examples
    ]


@pytest.mark.parametrize("name", ["out.json", "out.jsonl", "out.JSON.gz", "deep/er/out.jsonl.gz"])
def test_a_written_file_is_read_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(EXAMPLES, path)
    file = read(path)
    assert file.problems == ()
    assert file.format == ("flat" if "jsonl" in name else "squad")
    assert fields(file.examples) == fields(EXAMPLES)
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_the_structure_of_a_squad_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_squad([EXAMPLES[0], EXAMPLES[2], EXAMPLES[1]], path, version="mine-1")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["version"] == "mine-1"
    elbe, oslo = document["data"]
    assert (elbe["title"], oslo["title"]) == ("Elbe", "Oslo")
    (paragraph,) = elbe["paragraphs"]
    assert [qa["id"] for qa in paragraph["qas"]] == ["1", "2"]
    assert [qa["is_impossible"] for qa in paragraph["qas"]] == [False, True]
    assert paragraph["qas"][1]["plausible_answers"] == [{"text": "Dresden", "answer_start": 23}]
    assert "plausible_answers" not in paragraph["qas"][0]
    assert "❤" in path.read_text(encoding="utf-8")


def test_the_structure_of_a_flat_file(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    write_flat(EXAMPLES[:2], path)
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert list(first) == ["id", "title", "context", "question", "answers", "is_impossible"]
    assert first["answers"][2] == {"text": "through Dresden", "answer_start": 15}
    assert second["is_impossible"] is True


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ANSWERS = st.lists(st.builds(Answer, TEXTS, st.integers(0, 99)), max_size=2).map(tuple)


@given(st.data(), st.lists(st.builds(Context, TEXTS, TEXTS), min_size=1, max_size=3))
def test_any_examples_are_read_back(data: st.DataObject, contexts: list[Context]) -> None:
    valid_answers = ANSWERS.filter(lambda answers: all(answer.text for answer in answers))
    rest = st.tuples(TEXTS, st.sampled_from(contexts), valid_answers, ANSWERS, st.none() | TEXTS)
    ids = data.draw(st.lists(TEXTS.filter(str.strip), min_size=1, max_size=5, unique=True))
    examples = [Example(id, *data.draw(rest)) for id in ids]
    with tempfile.TemporaryDirectory() as folder:
        write_flat(examples, Path(folder) / "flat")
        assert fields(read(Path(folder) / "flat").examples) == fields(examples)
        write_squad(examples, Path(folder) / "squad")
        again = read(Path(folder) / "squad")
        assert again.format in ("squad", "korquad")
        assert sorted(fields(again.examples), key=str) == sorted(fields(examples), key=str)
        write_squad(again.examples, Path(folder) / "twice")  # once grouped, the order stays the same
        assert (Path(folder) / "twice").read_bytes() == (Path(folder) / "squad").read_bytes()


def test_equal_examples_make_equal_files(tmp_path: Path) -> None:
    write(EXAMPLES, tmp_path / "a.json.gz")
    write(EXAMPLES, tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


@pytest.mark.parametrize("name", ["out.csv", "out", "out.gz", "out.json.zip"])
def test_a_name_without_a_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.json\[\.gz\] \(squad\) or \.jsonl\[\.gz\] \(flat\)"):
        write(EXAMPLES, tmp_path / name)
    write(EXAMPLES, tmp_path / name, format="flat")
    assert (tmp_path / name).is_file()


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'squad'"):
        write(EXAMPLES, tmp_path / "out.json", format="sqaud")


def test_a_text_that_cannot_be_encoded_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(DataError, match=r"\\ud83d"):
        write([Example("1", "\ud83d?", OSLO)], path)
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(LamellaError, match="cannot be written"):
        write(EXAMPLES, tmp_path / "file" / "out.json")


@pytest.mark.parametrize("name", ["cs224n-dev.json.gz", "KorQuAD_v1.0_dev.json"])
def test_published_files_are_written_unchanged(name: str, real_data: Path, tmp_path: Path) -> None:
    original = read(real_data / name)
    write(original.examples, tmp_path / "out.json")
    again = read(tmp_path / "out.json")
    assert again.format == original.format
    assert fields(again.examples) == fields(original.examples)
    write(original.examples, tmp_path / "out.jsonl")
    assert fields(read(tmp_path / "out.jsonl").examples) == fields(original.examples)


def test_gzip_is_chosen_by_the_last_suffix_only(tmp_path: Path) -> None:
    write_flat(EXAMPLES, tmp_path / "data.gz")
    assert len(gzip.decompress((tmp_path / "data.gz").read_bytes()).splitlines()) == len(EXAMPLES)


def test_a_submission_is_csv_sorted_by_id_and_quoted_if_necessary(tmp_path: Path) -> None:
    write_submission({"b": 'he said "no", twice', "a": "", "c": "two\nlines", "B": "Zoë"}, tmp_path / "sub.csv")
    assert (tmp_path / "sub.csv").read_bytes().decode("utf-8") == (
        'Id,Predicted\r\nB,Zoë\r\na,\r\nb,"he said ""no"", twice"\r\nc,"two\nlines"\r\n'
    )
    with pytest.raises(DataError, match="surrogate"):
        write_submission({"a": "\ud83d"}, tmp_path / "half.csv")
    assert not (tmp_path / "half.csv").exists()
