"""The weights of the encoder's layers for the tokens of answers. Only a model on torch has them, so it is loaded again.

One such model is in memory, that of the reader whose layers were shown last. It leaves with its reader: a reader that
is replaced or removed takes it along when its last request has finished.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from lamella.errors import LamellaError, RunError, UsageError
from lamella.inference.answer_layers import layers_of_answer
from lamella.inference.answer_list import Answer
from lamella.inference.protocols import QAModel
from lamella.inference.reader import Reader
from lamella.models.loading import load_model
from lamella.serve.calls import CALL, wait_patiently


class ShownLayers:
    """Adds layers to answers. Threads may share it; they take turns."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._models: WeakKeyDictionary[Reader, QAModel] = WeakKeyDictionary()
        self._turn = threading.Lock()

    def add(self, reader: Reader, source: str, question: str, answers: Iterable[Answer]) -> None:
        """Add to each answer of a reader, which was loaded from `source`, the weights of the layers for its tokens."""
        if importlib.util.find_spec("torch") is None:
            raise UsageError("layers: expected a server with torch, and this one has none; ask without layers.")
        call = CALL.get()
        with self._my_turn():  # for all answers, so that readers asked together are loaded once each
            model = self._models.get(reader)
            if model is None:
                self._models.clear()
                try:
                    model = load_model(source, device=self._device, backend="torch", inference_only=True)
                except LamellaError as error:  # a fault of the server, not of the request
                    raise RunError(str(error)) from None
                self._models[reader] = model
            for answer in answers:
                if call is not None:
                    call.check()
                answer["layers"] = layers_of_answer(model, question, answer)

    @contextmanager
    def _my_turn(self) -> Any:
        wait_patiently(lambda seconds: self._turn.acquire(timeout=seconds))
        try:
            yield
        finally:
            self._turn.release()
