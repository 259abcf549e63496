"""Protocols that a model offers so that its questions can be answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions, WindowOptions
from lamella.data.features import Features
from lamella.data.padding import Padded
from lamella.data.tokens import Tokenizing


class AnswerSource(Protocol):
    """Whatever answers are decided by: a model, or several of them together."""

    @property
    def decoding(self) -> DecodingOptions: ...

    @property
    def gives_text(self) -> bool:
        """Whether it finds answers, or only tells whether there is one."""


class QAModel(AnswerSource, Protocol):
    """A model that answers: what of it decoding needs to know, and its logits."""

    @property
    def tokenizer(self) -> Tokenizing: ...

    @property
    def windows(self) -> WindowOptions: ...

    @property
    def folders(self) -> tuple[Path, ...]:
        """What it was loaded from."""

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Those of its task, [2, B, T]: of starts and ends; or [2, B, 1]: of "here" and "not here"."""


class LogitsSink(Protocol):
    """Receives the logits of every batch of windows while a model answers."""

    def add(self, features: Features, padded: Padded, logits: NDArray[Any]) -> None:
        """Take the logits [2, B, T] of some windows of `features`."""
