"""The readers in memory: loaded when they are first asked, removed when others need the room."""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions, WindowOptions
from lamella.data.windows.padding import Padded
from lamella.data.windows.tokens import Tokenizing
from lamella.errors import UsageError
from lamella.inference.answer_layers import layers_of_answer
from lamella.inference.answer_list import Answer
from lamella.inference.protocols import QAModel
from lamella.inference.reader import Reader
from lamella.models.loading import load_model
from lamella.models.window_engine import OwnEngine, join_logits, split_rows
from lamella.serve.catalogue import Listed
from lamella.serve.micro_batch import MicroBatcher, Observer
from lamella.serve.settings import Settings
from lamella.serve.shared_tokenizers import SharedTokenizers


class QueuedModel:
    """A model whose windows go through a queue that it shares with other requests, and maybe other readers."""

    def __init__(self, model: QAModel, batcher: MicroBatcher, tokenizer: Tokenizing, delta: Any = None) -> None:
        self.tokenizer, self.folders = tokenizer, tuple(model.folders)
        self.windows: WindowOptions = model.windows
        self.decoding: DecodingOptions = model.decoding
        self.gives_text = model.gives_text
        self.device = getattr(model, "device", "cpu")
        self._batcher, self._delta = batcher, delta

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Return the logits of a padded batch; 0 at the padding."""
        logits = self._batcher.logits(split_rows(padded, self._delta))
        return join_logits(logits, padded.mask.shape[1])


@dataclass(frozen=True, eq=False)
class LoadedReader:
    """A reader in memory."""

    listed: Listed
    reader: Reader
    batcher: MicroBatcher
    shares_encoder: bool  # whether its windows go through the encoder together with those of other readers
    why: str | None  # it does not
    seconds: float  # that loading took

    def close(self) -> None:
        """Let the requests that use it finish, and free its memory."""
        self.batcher.close()


class ReaderPool:
    """The readers in memory, by name. Threads may share it: loading one reader does not stall the others."""

    def __init__(self, settings: Settings, *, observe: Observer | None = None) -> None:
        self._settings, self._observe = settings, observe
        self._loaded: OrderedDict[str, LoadedReader] = OrderedDict()  # the least recently used first
        self.tokenizers = SharedTokenizers(settings.token_cache)
        self._lock = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}
        self._with_torch: tuple[Listed, QAModel] | None = None  # the reader whose layers were shown last
        self._showing_layers = threading.Lock()

    def get(self, listed: Listed) -> LoadedReader:
        """Return a reader, after loading it if it is not in memory."""
        with self._lock:
            loaded = self._loaded.get(listed.name)
            if loaded is not None:
                self._loaded.move_to_end(listed.name)
                return loaded
            loading = self._loading.setdefault(listed.name, threading.Lock())
        with loading:  # the first loads it, the others wait
            with self._lock:
                loaded = self._loaded.get(listed.name)
            return loaded or self.replace(listed)

    def replace(self, listed: Listed) -> LoadedReader:
        """Load a reader from its folder, in place of the one in memory; requests that use the old one finish."""
        loaded = self._load(listed)
        with self._lock:
            removed = [self._loaded.pop(listed.name, None)]
            self._loaded[listed.name] = loaded
            while len(self._loaded) > self._settings.most_loaded:
                removed.append(self._loaded.popitem(last=False)[1])
        for old in filter(None, removed):
            old.close()
        return loaded

    def remove(self, name: str) -> None:
        """Remove a reader from memory."""
        with self._lock:
            loaded = self._loaded.pop(name, None)
            self._loading.pop(name, None)
        if loaded is not None:
            loaded.close()

    def layers(self, listed: Listed, question: str, answer: Answer) -> dict[str, Any]:
        """Return the weights of the encoder's layers for the tokens of an answer; the model is loaded with torch."""
        if importlib.util.find_spec("torch") is None:
            raise UsageError("layers: expected a server with torch, and this one has none; ask without layers.")
        with self._showing_layers:
            if self._with_torch is None or self._with_torch[0] != listed:
                model = load_model(listed.source, device=self._settings.device, backend="torch", inference_only=True)
                self._with_torch = (listed, model)
            return layers_of_answer(self._with_torch[1], question, answer)

    def loaded(self, name: str) -> LoadedReader | None:
        """Return a reader if it is in memory."""
        with self._lock:
            return self._loaded.get(name)

    def __len__(self) -> int:
        return len(self._loaded)

    def close(self) -> None:
        """Remove all readers."""
        for name in list(self._loaded):
            self.remove(name)

    def _load(self, listed: Listed) -> LoadedReader:
        begin = perf_counter()
        settings = self._settings
        model = load_model(
            listed.source,
            device=settings.device,
            precision=settings.precision,
            backend=settings.backend,
            threads=settings.threads,
            inference_only=True,
        )
        batcher = MicroBatcher(OwnEngine(model), most_tokens=settings.batch_tokens, observe=self._observe)
        reader = Reader(QueuedModel(model, batcher, self.tokenizers.share(model.tokenizer)))
        return LoadedReader(listed, reader, batcher, False, "", perf_counter() - begin)
