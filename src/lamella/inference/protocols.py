"""Protocols of inference: what a model must offer so that it can be asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lamella.config import WindowOptions
from lamella.data.windows.features import Features
from lamella.data.windows.padding import Padded
from lamella.data.windows.tokens import Tokenizing
from lamella.decoding_options import DecodingOptions


class AnswerSource(Protocol):
    """A model or an ensemble: how its scores are decoded, and whether it finds answers."""

    @property
    def decoding(self) -> DecodingOptions: ...

    @property
    def gives_text(self) -> bool:
        """Whether it finds answers; False if it only decides whether there is one."""


class QAModel(AnswerSource, Protocol):
    """A model that answers questions: our own, a transformers checkpoint, or an exported one."""

    @property
    def tokenizer(self) -> Tokenizing: ...

    @property
    def windows(self) -> WindowOptions: ...

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders it was loaded from."""

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Return the logits of some windows: start and end [2, B, T], or "here" and "not here" [2, B, 1].

        The next call must not change the array: it is decoded while that runs.
        """


@runtime_checkable
class BeginsLogits(Protocol):
    """A model that may compute logits beside the thread that asked for them, as a GPU does."""

    def begin_logits(self, padded: Padded) -> Callable[[], NDArray[np.float32]]:
        """Begin to compute the logits of some windows; return a function that waits for them."""


class LogitsSink(Protocol):
    """Receives the logits of every batch of windows while a model answers."""

    def add(self, features: Features, padded: Padded, logits: NDArray[Any]) -> None:
        """Take the logits [2, B, T] of some windows of `features`."""
