"""Check that an encoder is the base of a saved model: by its file or tensors, or as the original of a rounded copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lamella.encoder.identity import Difference, Parameters, hash_arrays
from lamella.errors import ModelError, warn
from lamella.models.saved import SavedModel


class FoundTensors(NamedTuple):
    """The tensors of an encoder whose file is not the recorded one."""

    sha256: str
    difference: Difference | None  # from the recorded encoder, if the model records it as a rounded copy

    @classmethod
    def examine(cls, parameters: Parameters, saved: SavedModel) -> FoundTensors:
        """Hash the tensors, and compare them with the recorded sample if there is one."""
        return cls(hash_arrays(parameters), saved.rounding.compare(parameters) if saved.rounding else None)


def check_base(folder: Path, saved: SavedModel, sha256: str, examine: Callable[[], FoundTensors] | None) -> str | None:
    """Check an encoder by the hash of its file, and else by its tensors, if they can be examined.

    Return None if it is the encoder that the model was trained on. If that was a rounded copy and this is its original,
    warn and return the hash of its tensors. Raise ModelError for any other.
    """
    if sha256 == saved.base_sha256:
        return None
    found = examine() if examine is not None and saved.base_tensors_sha256 is not None else None
    if found is not None and found.sha256 == saved.base_tensors_sha256:
        return None
    if found is not None and found.difference is not None and found.difference.explained:
        share = f"{100 * found.difference.relative:.1f} %"
        warn(
            f"{folder}: was trained on a rounded copy of its base encoder {saved.base_name!r}. The encoder found is "
            f"the original: its weights differ by {share}, so a few answers may differ too."
        )
        return found.sha256
    original = ", or the encoder that it was rounded from" if saved.rounding else ""
    raise ModelError(
        f"{folder}: expected base encoder {saved.base_name!r} with sha256 {saved.base_sha256[:12]}…{original}, "
        f"found {sha256[:12]}…{_describe(found) if saved.rounding else ''}; use the encoder that the model was trained "
        "on."
    )


def _describe(found: FoundTensors | None) -> str:
    if found is None:
        return ", which cannot be compared with it, because the model reads the pooler"
    if found.difference is None:
        return ", with tensors of other names or shapes"
    difference = found.difference
    return (
        f", which differs by {difference.in_all:.1f} times the error of the rounding, most in {difference.tensor}, by "
        f"{difference.largest:.1f} times"
    )
