"""The mixer keeps the contract that Lamella's own mixers keep."""

from lamella.testing import check_mixer


def test_gated() -> None:
    check_mixer("gated", temperature=2.0)
