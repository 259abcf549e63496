"""Loading restores the state of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamella.data import dataset
from lamella.data.dataset import load_examples
from lamella.errors import UnreadableError


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
