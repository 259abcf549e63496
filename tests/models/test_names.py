"""Names of models: what is suggested for one that does not exist."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lamella.errors import UsageError
from lamella.models.names import find_model
from tiny_reader import save_tiny_bert, save_tiny_reader


def test_the_model_with_the_nearest_name_is_suggested(tmp_path: Path) -> None:
    save_tiny_reader(tmp_path / "mine", save_tiny_bert(tmp_path / "encoder"))
    (tmp_path / "mina").mkdir()  # no model
    with pytest.raises(UsageError) as caught:
        find_model(str(tmp_path / "min"))
    assert str(caught.value).endswith(f" Did you mean {str(tmp_path / 'mine')!r}?")


@pytest.mark.parametrize("name", ["nowhere/at/all", f"{'x' * 5000}{os.sep}y", "a\0b/c"])
def test_a_name_that_is_like_none_gets_no_suggestion(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_model(name)
    assert "Did you mean" not in str(caught.value)
