"""The fuzzer finds planted faults, and none in the package; JSON of every shape is read or refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broken.counts import TRUST, keep_fuzzer
from broken.fuzzing import FUZZERS, Fuzzer
from lamella.data.examples import Example
from lamella.data.file_formats.formats import read_records
from lamella.errors import LamellaError

SECONDS = 60.0  # of processor time for each fuzzer, in the slow lane
KEYS = (
    "data",
    "paragraphs",
    "qas",
    "qa",
    "context",
    "contents",
    "question",
    "id",
    "answers",
    "answer",
    "text",
    "group",
)
PLANTED = """
def run(path):
    data = path.read_bytes()
    if b"[" in data:
        if b"{" in data:
            if data[:1] == b"]":
                1 / 0
"""
KEYS += ("group", "answer_start", "answer_text", "is_impossible", "plausible_answers", "title", "version")


def json_values() -> st.SearchStrategy[Any]:
    """Return a strategy for JSON that looks like data: objects with the keys that formats have, and wrong values."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    objects = st.dictionaries(st.sampled_from(KEYS), st.deferred(lambda: values), max_size=5)
    values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | objects, max_leaves=20)
    question = st.fixed_dictionaries({"question": values, "id": values, "answers": values})
    paragraph = st.fixed_dictionaries({"context": leaves | st.text(), "qas": values | st.lists(question, max_size=3)})
    article = st.fixed_dictionaries({"title": values, "paragraphs": values | st.lists(paragraph, max_size=2)})
    flat = st.fixed_dictionaries({"question": leaves, "context": leaves}, optional={"answers": values, "id": leaves})
    return values | st.lists(flat, max_size=3) | st.fixed_dictionaries({"data": st.lists(article, max_size=2)})


@settings(max_examples=150, derandomize=True)
@given(json_values())
def test_json_of_every_shape_is_read_or_refused(value: Any) -> None:
    try:
        found = read_records(value, "records")
    except LamellaError as error:
        if "\n" in str(error):
            raise
        return
    assert all(isinstance(example, Example) for example in found.examples)
    assert all(isinstance(example.context.text, str) and isinstance(example.id, str) for example in found.examples)


def test_the_fuzzer_finds_a_fault_behind_three_conditions(tmp_path: Path) -> None:
    """Each condition has a line of its own, in a file that seems to be the package's: coverage leads to the next."""
    names: dict[str, Any] = {}
    exec(compile(PLANTED, "/lamella/planted.py", "exec"), names)
    fuzzer = Fuzzer(names["run"], [b"sound"], tmp_path / "input")
    fuzzer.fuzz(1.5)
    assert len(fuzzer.lines) == 5
    assert any("ZeroDivisionError" in fault for fault in fuzzer.faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZERS)
def test_the_fuzzer_finds_no_fault(name: str, tmp_path: Path) -> None:
    fuzzer = FUZZERS[name](tmp_path)
    seeds = len(fuzzer.inputs)
    fuzzer.fuzz(SECONDS)
    if file := os.environ.get(TRUST):
        keep_fuzzer(Path(file), name, fuzzer, seeds, SECONDS)
    assert not fuzzer.faults
    assert len(fuzzer.inputs) > seeds, "no input reached new lines"
    assert fuzzer.longest < 30
