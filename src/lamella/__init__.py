"""Extractive question answering from every layer of a pretrained encoder, trained thin."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lamella.errors import LamellaError, LamellaWarning, explain_missing
from lamella.version import __version__

if TYPE_CHECKING:
    from lamella.api import Run, compare, evaluate, report, train
    from lamella.config import RunConfig
    from lamella.data.dataset import load_examples
    from lamella.documents.collection import Documents
    from lamella.inference.reader import Reader
    from lamella.models.model import ReaderModel

__all__ = [
    "Documents",
    "LamellaError",
    "LamellaWarning",
    "Reader",
    "ReaderModel",
    "Run",
    "RunConfig",
    "__version__",
    "compare",
    "evaluate",
    "load_examples",
    "report",
    "train",
]

# Imported on first use: torch and transformers take seconds, and not every program needs them.
_MODULES = {
    "Documents": "lamella.documents.collection",
    "Reader": "lamella.inference.reader",
    "ReaderModel": "lamella.models.model",
    "Run": "lamella.api",
    "RunConfig": "lamella.config",
    "compare": "lamella.api",
    "evaluate": "lamella.api",
    "load_examples": "lamella.data.dataset",
    "report": "lamella.api",
    "train": "lamella.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'lamella' has no attribute {name!r}")
    with explain_missing(f"lamella.{name}"):
        module = import_module(_MODULES[name])
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    """List the public names for completion, also those not imported yet."""
    return sorted({*globals(), *__all__})
