"""Extractive question answering from every layer of a pretrained encoder, trained thin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamella.errors import LamellaError
from lamella.version import __version__

if TYPE_CHECKING:
    from lamella.inference.reader import Reader

__all__ = ["LamellaError", "Reader", "__version__"]


def __getattr__(name: str) -> Any:
    """`Reader` brings torch along, so it is imported when it is first asked for."""
    if name == "Reader":
        from lamella.inference.reader import Reader

        return Reader
    raise AttributeError(f"module 'lamella' has no attribute {name!r}")


def __dir__() -> list[str]:
    """`Reader` is offered where names are completed, before anything of it is imported."""
    return sorted({*globals(), *__all__})
