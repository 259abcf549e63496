"""Check that a part of yours keeps the contract of its family: the same checks that Lamella runs on its own parts.

    from lamella.testing import check_mixer, check_tuning

    def test_my_mixer() -> None:
        check_mixer("my_mixer", size=8)

A check that fails raises an `AssertionError` that names the part, the case and what is wrong. The checks run on tiny
random encoders and need neither a network nor pytest.
"""

from __future__ import annotations

from lamella.testing.mixer_checks import check_mixer
from lamella.testing.tiny import save_tiny_encoder, tiny_batch, tiny_encoder
from lamella.testing.tuning_checks import check_tuning

__all__ = ["check_mixer", "check_tuning", "save_tiny_encoder", "tiny_batch", "tiny_encoder"]
