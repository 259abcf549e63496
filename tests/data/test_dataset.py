"""Loading restores the state of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamella.data import dataset
from lamella.data.dataset import load_examples
from lamella.errors import UnknownNameError, UnreadableError


@pytest.fixture(params=[True, False])
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Switch the garbage collector on or off beforehand."""
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


def test_garbage_collection_is_restored(collecting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    check = dataset.check
    monkeypatch.setattr(dataset, "check", lambda files: (seen.append(gc.isenabled()), check(files))[1])
    load_examples(["demo:dev"])
    assert seen == [False]
    assert gc.isenabled() == collecting
    with pytest.raises(UnreadableError):
        load_examples([tmp_path / "absent.json"])
    assert gc.isenabled() == collecting


@pytest.mark.parametrize("choice", ["FIX", "drop", "", None, 5])
def test_an_unknown_choice_about_errors_is_refused(choice: Any) -> None:
    """It must not be taken for "skip": questions would be lost without a word."""
    with pytest.raises(UnknownNameError, match=r"on_bad_answer .* does not exist\. (Did|Known)"):
        load_examples("demo:dev", on_bad_answer=choice)


def test_the_text_of_a_data_set_is_its_counts() -> None:
    assert repr(load_examples("demo:dev")) == "<Dataset of demo:dev: 135 examples, 0 fixed, 0 skipped>"
