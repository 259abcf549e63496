"""The readers in memory: loaded when they are first asked, removed when others need the room."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions, WindowOptions
from lamella.data.windows.padding import Padded
from lamella.data.windows.tokens import Tokenizing
from lamella.errors import UsageError
from lamella.graph.support import NoGraphError
from lamella.inference.answer_layers import layers_of_answer
from lamella.inference.answer_list import Answer
from lamella.inference.protocols import QAModel
from lamella.inference.reader import Reader
from lamella.models.loading import check_onnx_options, load_model, load_shared, suits_onnx
from lamella.models.shared_encoder import SharedEncoders, SharedReader
from lamella.models.window_engine import OwnEngine, join_logits, split_rows
from lamella.serve.catalogue import Listed
from lamella.serve.freed_memory import FreedMemory
from lamella.serve.micro_batch import MicroBatcher, Observer
from lamella.serve.settings import Settings
from lamella.serve.shared_tokenizers import SharedTokenizers

if TYPE_CHECKING:
    from lamella.models.torch_encoders import TorchEncoders, TorchReader

logger = logging.getLogger("lamella.serve")

PATH = re.compile(r"(^|\s)(/|~|\w:)")
BESIDE_TENSORS = 64 * 1024  # bytes that a reader takes beside its tensors, such as its options


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
    seconds: float  # that loading took
    own: MicroBatcher | None  # the queue of a reader that shares its encoder with no other
    why: str | None  # it does not share its encoder; None if it does
    nbytes: int  # of what belongs to this reader, if it shares its encoder; else 0

    @property
    def shares_encoder(self) -> bool:
        """Whether its windows go through the encoder together with those of other readers."""
        return self.own is None

    def close(self) -> None:
        """Let the requests that use it finish, and free its memory."""
        if self.own is not None:
            self.own.close()


class ReaderPool:
    """The readers in memory, by name. Threads may share it: loading one reader does not stall the others.

    Readers on equal base encoders share one, where they can. They take little memory and are loaded in milliseconds, so
    they are limited by their bytes; readers with an encoder of their own are limited by their number.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        pinned: str | None = None,
        alone: bool = False,
        observe: Observer | None = None,
    ) -> None:
        """Make a pool in which the reader `pinned` stays in memory.

        If it is to be `alone`, it gets an encoder with its tensors merged into it, which is faster.
        """
        self._settings, self._pinned, self._alone, self._observe = settings, pinned, alone, observe
        self._loaded: OrderedDict[str, LoadedReader] = OrderedDict()  # the least recently used first
        self.tokenizers = SharedTokenizers(settings.token_cache)
        self._lock = threading.Lock()
        # One thread loads the readers that share an encoder. What loading frees stays in the heap of its thread: with
        # 32 threads, a server that had been asked with 100 readers took 430 MB instead of 300.
        self._loader = ThreadPoolExecutor(1, "lamella-load")
        self._freed_memory = FreedMemory()
        self._loading: dict[str, threading.Lock] = {}
        self._encoders = _open_encoders(settings, alone=alone)
        self._shared = MicroBatcher(self._encoders, most_tokens=settings.batch_tokens, observe=observe)
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
            old = self._loaded.pop(listed.name, None)
            self._loaded[listed.name] = loaded
            removed = [loaded for loaded in (old, *self._evict()) if loaded is not None]
        for each in removed:
            each.close()
        if removed:
            self._freed_memory.request()
        return loaded

    def _evict(self) -> list[LoadedReader]:
        """Remove the least recently used readers beyond the limits, but never the newest."""
        memory = sum(loaded.nbytes for loaded in self._loaded.values())
        own = sum(not loaded.shares_encoder for loaded in self._loaded.values())
        removed = []
        for name, loaded in list(self._loaded.items())[:-1]:
            too_many = memory > self._settings.memory if loaded.shares_encoder else own > self._settings.most_loaded
            if too_many and name != self._pinned:
                removed.append(self._loaded.pop(name))
                memory -= loaded.nbytes
                own -= not loaded.shares_encoder
        return removed

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
        self._loader.shutdown(wait=False)
        self._shared.close()

    def _load(self, listed: Listed) -> LoadedReader:
        begin = perf_counter()
        try:
            shared = self._loader.submit(self._load_shared, listed).result()
        except NoGraphError as reason:
            model = self._load_own(listed)
            batcher = MicroBatcher(OwnEngine(model), most_tokens=self._settings.batch_tokens, observe=self._observe)
            reader = Reader(QueuedModel(model, batcher, self.tokenizers.share(model.tokenizer)))
            return LoadedReader(listed, reader, perf_counter() - begin, batcher, _without_paths(reason), 0)
        reader = Reader(QueuedModel(shared, self._shared, self.tokenizers.share(shared.tokenizer), shared))
        return LoadedReader(listed, reader, perf_counter() - begin, None, None, shared.nbytes + BESIDE_TENSORS)

    def _load_shared(self, listed: Listed) -> SharedReader | TorchReader:
        """Load a reader onto a shared encoder; raise NoGraphError, with the reason, if it needs one of its own."""
        settings = self._settings
        if self._alone:
            raise NoGraphError("it is the only reader of this server")
        if settings.precision == "int8":
            raise NoGraphError("readers in int8 share no encoder")
        if not _wants_torch(settings):
            check_onnx_options(listed.source, settings.device, settings.precision)
        elif isinstance(self._encoders, SharedEncoders):
            raise NoGraphError("torch is not installed")
        return load_shared(listed.source, self._encoders)

    def _load_own(self, listed: Listed) -> QAModel:
        settings = self._settings
        return load_model(
            listed.source,
            device=settings.device,
            precision=settings.precision,
            backend=settings.backend,
            threads=settings.threads,
            inference_only=True,
        )


def _open_encoders(settings: Settings, *, alone: bool) -> SharedEncoders | TorchEncoders:
    """Return what loads readers onto shared encoders, on torch or onnxruntime."""
    if alone or not _wants_torch(settings) or importlib.util.find_spec("torch") is None:
        return SharedEncoders(settings.threads)
    from lamella.models.torch_encoders import TorchEncoders

    return TorchEncoders(
        settings.device, settings.precision, most_tokens=settings.batch_tokens, threads=settings.threads
    )


def _wants_torch(settings: Settings) -> bool:
    """Return whether `load_model` would use torch for readers that have a graph."""
    if settings.backend == "auto":
        return settings.precision != "int8" and not suits_onnx(settings.device, settings.precision)
    return settings.backend == "torch"


def _without_paths(reason: NoGraphError) -> str:
    """Return the reason for clients, who must not learn the folders of this machine."""
    if PATH.search(str(reason)):
        logger.info("a reader shares no encoder: %s", reason)
        return "no graph can be made that it could share; the log of the server has the reason"
    return str(reason)
