"""The readers in memory: loaded when they are first asked, removed when others need the room."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lamella.config import WindowOptions
from lamella.cores import usable_cores
from lamella.data.windows.padding import Padded
from lamella.data.windows.tokens import Tokenizing
from lamella.decoding_options import DecodingOptions
from lamella.documents.passages import PassageCache
from lamella.errors import ModelError
from lamella.graph.support import NoGraphError
from lamella.inference.protocols import QAModel
from lamella.inference.reader import Reader
from lamella.models.loading import check_onnx_options, load_model, load_shared, suits_onnx
from lamella.models.shared_encoder import SharedEncoders, SharedReader
from lamella.models.window_engine import OwnEngine, join_logits, split_rows
from lamella.serve.calls import wait_patiently
from lamella.serve.catalogue import Listed
from lamella.serve.freed_memory import FreedMemory
from lamella.serve.micro_batch import MicroBatcher, Observer
from lamella.serve.refusals import names_folder
from lamella.serve.settings import Settings
from lamella.serve.shared_tokenizers import SharedTokenizers
from lamella.serve.shown_layers import ShownLayers

if TYPE_CHECKING:
    from lamella.models.torch_encoders import TorchEncoders, TorchReader

logger = logging.getLogger("lamella.serve")

LOADERS = 2  # threads that load readers on shared encoders
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
    queue: MicroBatcher  # of its windows; its own, if it shares its encoder with no other
    why: str | None  # it does not share its encoder; None if it does
    nbytes: int  # of what belongs to this reader, if it shares its encoder; else 0
    encoder: object  # identifies the encoder in memory that this reader uses, maybe with others

    @property
    def shares_encoder(self) -> bool:
        """Whether its windows go through the encoder together with those of other readers."""
        return self.why is None

    def close(self) -> None:
        """Let the requests that use it finish, and free its memory."""
        if not self.shares_encoder:
            self.queue.close()


class ReaderPool:
    """The readers in memory, by name. Threads may share it: loading one reader does not stall the others.

    Readers on equal base encoders share one, where they can. They take little memory and are loaded in milliseconds, so
    they are limited by their bytes. Encoders, shared or not, are limited by their number; the least recently used leave
    with all of their readers.

    Readers are loaded in threads of the pool. Of several loads of one reader, the one that began last counts, so that
    an old version never replaces a newer one. Removing a reader makes those that have begun count no longer.
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
        self._passages = PassageCache(settings.passage_characters)
        self._lock = threading.Lock()
        self._loading: dict[str, tuple[int, Future[LoadedReader]]] = {}  # the load of each reader that counts
        self._numbers = count()  # of loads
        # Few threads: what loading frees stays in the heap of its thread. With 32 threads, a server that had been asked
        # with 100 readers took 430 MB instead of 300.
        self._loaders = ThreadPoolExecutor(LOADERS, "lamella-load")
        # An encoder takes seconds to load; the readers that need none must not wait for it.
        self._encoder_loader = ThreadPoolExecutor(1, "lamella-load-encoder")
        self._loading_encoder = threading.Lock()  # at most one more than the limit is in memory
        self._freed_memory = FreedMemory()
        self._encoders = _open_encoders(settings, alone=alone)
        self._shared = MicroBatcher(self._encoders, most_tokens=settings.batch_tokens, observe=observe)
        self.shown_layers = ShownLayers(settings.device)

    def get(self, listed: Listed) -> LoadedReader:
        """Return a reader, after loading it if it is not in memory."""
        if (loaded := self._use(listed)) is not None:
            return loaded
        loader = self._choose_loader(listed)
        with self._lock:
            if (loaded := self._loaded.get(listed.name)) is not None:  # since then
                return loaded
            _, load = self._loading.get(listed.name) or self._begin(listed, loader)
        return _finished(load)

    def replace(self, listed: Listed) -> LoadedReader:
        """Load a reader from its folder, in place of the one in memory; requests that use the old one finish."""
        loader = self._choose_loader(listed)
        with self._lock:
            _, load = self._begin(listed, loader)
        return _finished(load)

    def remove(self, name: str) -> None:
        """Remove a reader from memory."""
        with self._lock:
            loaded = self._loaded.pop(name, None)
            self._loading.pop(name, None)
        if loaded is not None:
            loaded.close()

    def _use(self, listed: Listed) -> LoadedReader | None:
        """Return a reader that is in memory, and note that it is used."""
        with self._lock:
            loaded = self._loaded.get(listed.name)
            if loaded is not None:
                self._loaded.move_to_end(listed.name)
            return loaded

    def _choose_loader(self, listed: Listed) -> ThreadPoolExecutor:
        """Return the threads that are to load a reader, judged by its configuration."""
        shares, _ = self.sharing(listed)
        return self._encoder_loader if shares is False else self._loaders

    def _begin(self, listed: Listed, loader: ThreadPoolExecutor) -> tuple[int, Future[LoadedReader]]:
        """Begin to load a reader; the lock is held."""
        number = next(self._numbers)
        load = self._loading[listed.name] = number, loader.submit(self._load_into_memory, listed, number)
        return load

    def _load_into_memory(self, listed: Listed, number: int) -> LoadedReader:
        """Load a reader, and keep it in memory unless it has been removed, or its next version is being loaded."""
        try:
            loaded = self._load(listed)
        except BaseException as error:
            with self._lock:
                self._end(listed, number)
            if isinstance(error, OSError):  # such as files that the user of the server may not read, or a full disk
                raise ModelError(f"{error.filename or listed.source}: {error.strerror or error}.") from None
            raise
        removed = [loaded]
        with self._lock:
            if self._end(listed, number):
                old = self._loaded.pop(listed.name, None)
                self._loaded[listed.name] = loaded
                removed = [*([] if old is None else [old]), *self._evict()]
        for each in removed:
            each.close()
        if removed:
            self._freed_memory.request()
        return loaded

    def _end(self, listed: Listed, number: int) -> bool:
        """End a load; return whether it counts. The lock is held."""
        counts = self._loading.get(listed.name, (None,))[0] == number
        if counts:
            del self._loading[listed.name]
        return counts

    def _evict(self) -> list[LoadedReader]:
        """Remove the least recently used readers beyond the limits, but never the newest."""
        readers = list(self._loaded.values())  # the newest is the last
        lasting = [readers[-1], *filter(None, [self._loaded.get(self._pinned or "")])]
        used = dict.fromkeys(loaded.encoder for loaded in [*lasting, *reversed(readers)])
        encoders = set(list(used)[: self._settings.most_loaded]) | {loaded.encoder for loaded in lasting}
        memory = sum(loaded.nbytes for loaded in readers if loaded.encoder in encoders)
        most = self._settings.memory or self._encoders.usual_memory
        removed = []
        for loaded in readers:
            beyond = loaded.encoder not in encoders
            if beyond or (loaded not in lasting and loaded.nbytes and memory > most):
                removed.append(self._loaded.pop(loaded.listed.name))
                memory -= 0 if beyond else loaded.nbytes
        return removed

    def sharing(self, listed: Listed) -> tuple[bool | None, str | None]:
        """Return whether a reader shares its encoder, and why not: foreseen, or None, if it is not in memory."""
        if (loaded := self.loaded(listed.name)) is not None:
            return loaded.shares_encoder, loaded.why
        if why := self._why_none_shares():
            return False, why
        return listed.foresee_sharing(as_graph=isinstance(self._encoders, SharedEncoders))

    def loaded(self, name: str) -> LoadedReader | None:
        """Return a reader if it is in memory."""
        with self._lock:
            return self._loaded.get(name)

    def __len__(self) -> int:
        return len(self._loaded)

    def close(self) -> None:
        """Remove all readers."""
        for loader in (self._loaders, self._encoder_loader):
            loader.shutdown(cancel_futures=True)
        for name in list(self._loaded):
            self.remove(name)
        self._shared.close()

    def _load(self, listed: Listed) -> LoadedReader:
        try:
            shared = self._load_shared(listed)
        except NoGraphError as reason:
            with self._loading_encoder:
                model = self._load_own(listed)
            batcher = MicroBatcher(OwnEngine(model), most_tokens=self._settings.batch_tokens, observe=self._observe)
            reader = self._reader(QueuedModel(model, batcher, self.tokenizers.share(model.tokenizer)), batcher)
            return LoadedReader(listed, reader, batcher, _without_paths(reason), 0, batcher)
        queued = QueuedModel(shared, self._shared, self.tokenizers.share(shared.tokenizer), shared)
        reader = self._reader(queued, self._shared)
        nbytes = shared.nbytes + BESIDE_TENSORS
        return LoadedReader(listed, reader, self._shared, None, nbytes, shared.shared_part)

    def _reader(self, model: QueuedModel, queue: MicroBatcher) -> Reader:
        settings = self._settings
        windows = max(1, settings.batch_tokens // model.windows.max_seq_length)  # a whole batch
        if (enough := queue.engine.pace.windows) is not None:  # other questions would wait for more
            windows = min(windows, max(enough, settings.threads or usable_cores()))
        return Reader(model, batch_size=windows, passages=self._passages, most_tokens=settings.max_tokens)

    def _load_shared(self, listed: Listed) -> SharedReader | TorchReader:
        """Load a reader onto a shared encoder; raise NoGraphError, with the reason, if it needs one of its own."""
        settings = self._settings
        if why := self._why_none_shares():
            raise NoGraphError(why)
        if not _wants_torch(settings):
            check_onnx_options(listed.source, settings.device, settings.precision)
        return load_shared(listed.source, self._encoders)

    def _why_none_shares(self) -> str | None:
        """Return why no reader of this server shares an encoder; None if some may."""
        if self._alone:
            return "it is the only reader of this server"
        if self._settings.precision == "int8":
            return "readers in int8 share no encoder"
        if _wants_torch(self._settings) and isinstance(self._encoders, SharedEncoders):
            return "torch is not installed"
        return None

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


def _finished(load: Future[LoadedReader]) -> LoadedReader:
    wait_patiently(lambda seconds: bool(wait([load], seconds).done))
    return load.result()


def _without_paths(reason: NoGraphError) -> str:
    """Return the reason for clients, who must not learn the folders of this machine."""
    if names_folder(str(reason)):
        logger.info("a reader shares no encoder: %s", reason)
        return "no graph can be made that it could share; the log of the server has the reason"
    return str(reason)
