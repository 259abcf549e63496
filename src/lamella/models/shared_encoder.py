"""One base encoder in memory for many readers, on onnxruntime: the tensors of a reader are fed with each window.

A window runs through the encoder with the feeds of its reader, then through the head of that reader. Windows of any
readers can be mixed: each runs by itself, as in OnnxModel.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from lamella.data.windows.padding import check_window_length
from lamella.encoder.sources import MODEL_WEIGHTS, Source, verified_hash
from lamella.graph.fed_encoder import FedEncoder, Kind, is_kept
from lamella.graph.fed_head import SharedHead, build_shared_head
from lamella.graph.head_graph import plan_head
from lamella.graph.support import VERSION, NoGraphError
from lamella.graph.tensor_files import Tensors, read_outline, read_tensor_files
from lamella.graph.tuned_tensors import ParameterCounts, pretrained_tensors
from lamella.models.fed_tensors import FedTensors, WideTensors, as_values
from lamella.models.graph_cache import open_cached
from lamella.models.graph_model import Recipe, read_recipe
from lamella.models.onnx_sessions import Cores, Sessions, explain_failure
from lamella.models.tokenizer_file import Tokenizers
from lamella.models.window_engine import CPU_MEMORY, SMALL_BATCHES, Row, SharingModel
from lamella.user_cache import remembered_sha256

Run = Callable[[Sequence[Row]], Iterable[NDArray[np.float32]]]


class SharedEncoder:
    """A base encoder in memory; its readers hold their own tensors only. Threads may share it."""

    def __init__(self, recipe: Recipe, sha256: str) -> None:
        """Open the base encoder of a reader; `sha256` is the hash of its files."""
        self.config, self.base, self._sha256 = recipe.config, recipe.base, sha256
        self.fed = _outline(recipe)
        self._sessions: WeakValueDictionary[Kind, Sessions] = WeakValueDictionary()
        self._heads: WeakValueDictionary[bytes, Sessions] = WeakValueDictionary()
        self._lock = threading.Lock()

    def sessions(self, kind: Kind) -> Sessions:
        """Return the sessions of the encoder for a kind of reader; they belong to the readers that use them."""
        with self._lock:
            sessions = self._sessions.get(kind)
            if sessions is None:
                sessions = self._sessions[kind] = open_cached(
                    self._key(kind),
                    lambda: FedEncoder(self.config, self._read()).build(kind),
                    lambda graph: Sessions(graph, 1),
                )
            return sessions

    def head(self, graph: bytes) -> Sessions:
        """Return the sessions of the graph of a head; it belongs to the readers that use it."""
        with self._lock:
            sessions = self._heads.get(graph)
            if sessions is None:
                sessions = self._heads[graph] = Sessions(graph, 1, keep_bytes=True)
            return sessions

    def _read(self) -> Tensors:
        return pretrained_tensors(read_tensor_files(self.base.weights), self.config)

    def _key(self, kind: Kind) -> str:
        parts = [VERSION, "shared", kind, self._sha256, asdict(self.config)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class SharedReader(SharingModel):
    """A reader on a shared encoder: a model as `lamella.inference` asks it. Its own memory is that of its delta."""

    precision = "fp32"

    def __init__(self, encoder: SharedEncoder, recipe: Recipe, run: Run) -> None:
        kind, feeds, head = _read_feeds(recipe, encoder.fed)
        self.encoder, self.run, self.recipe, self.config = encoder, run, recipe, recipe.describe()
        self.windows, self.decoding, self.gives_text = recipe.windows, recipe.decoding, self.config.gives_text
        self.tokenizer, self.folders = recipe.tokenizer, recipe.folders
        self.layers = head.layers
        self.sessions, self.head_sessions = encoder.sessions(kind), encoder.head(head.graph)
        self.feeds, self.head_feeds = FedTensors(feeds), FedTensors(head.feeds)
        self.nbytes = self.feeds.nbytes + self.head_feeds.nbytes

    @property
    def shared_part(self) -> object:
        """The encoder in memory that readers of its kind share; it leaves with the last of them."""
        return self.sessions

    def count_parameters(self) -> ParameterCounts | None:
        """Count the parameters of the reader and its encoder."""
        return self.recipe.count_parameters()


class SharedEncoders:
    """Opens readers so that those on equal base encoders share one. An encoder is in memory while a reader uses it.

    It is the engine of all of these readers.
    """

    pace = SMALL_BATCHES
    usual_memory = CPU_MEMORY

    def __init__(self, threads: int | None = None) -> None:
        self.cores = Cores(threads)
        self._wide, self._wide_heads = WideTensors(), WideTensors()
        self._tokenizers = Tokenizers()
        self._encoders: WeakValueDictionary[str, SharedEncoder] = WeakValueDictionary()
        self._opening: dict[str, threading.Lock] = {}

    def reader(self, source: Source) -> SharedReader:
        """Open a reader; raise NoGraphError, with the reason, if it needs an encoder of its own."""
        recipe = read_recipe(source, open_tokenizer=self._tokenizers.open)
        return SharedReader(self._encoder(recipe), recipe, self.run)

    def overlap(self, windows: int) -> int:
        """Return how many windows of a batch may be left when the next batch begins."""
        return self.cores.overlap(windows)

    def run(self, rows: Sequence[Row]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of each window, [2, T] or [2, 1], in order; they may belong to any of the readers."""
        return self.cores.map(self._run, rows)

    def _run(self, threads: int, row: Row) -> NDArray[np.float32]:
        """Run one window through the encoder and the head of its reader; return its logits, [2, T]."""
        reader: SharedReader = row.delta
        tokens = len(row.input_ids)
        check_window_length(tokens, reader.config.positions)
        window = {
            "input_ids": row.input_ids[None],
            "attention_mask": np.ones((1, tokens), np.int64),
            "token_type_ids": row.token_types[None],
            "is_context": row.is_context[None],
        }
        encoder, head = reader.sessions, reader.head_sessions
        with explain_failure(tokens):
            inputs = as_values(window)
            own = {name: inputs[name] for name in inputs if name in encoder.inputs}
            with self._wide.lend(reader.feeds) as feeds:
                layers = encoder.get(threads).run_with_ort_values(reader.layers, {**feeds, **own})
            own = {name: inputs[name] for name in inputs if name in head.inputs}
            own |= dict(zip(reader.layers, layers, strict=True))
            with self._wide_heads.lend(reader.head_feeds) as feeds:
                (logits,) = head.get(threads).run_with_ort_values(None, {**feeds, **own})
        output: NDArray[np.float32] = logits.numpy()
        return output[:, 0]

    def _encoder(self, recipe: Recipe) -> SharedEncoder:
        key, sha256 = _identify(recipe)
        with self._opening.setdefault(key, threading.Lock()):  # other encoders can be opened at the same time
            encoder = self._encoders.get(key)
            if encoder is None:
                encoder = self._encoders[key] = SharedEncoder(recipe, sha256)
            return encoder


def _identify(recipe: Recipe) -> tuple[str, str]:
    """Return a key that is equal for equal base encoders, and the hash of the files of this one."""
    if not recipe.chain:
        raise NoGraphError("it is a checkpoint with an encoder of its own")
    if len(recipe.chain) > 1:
        raise NoGraphError("its base is a reader")
    ((_, saved),) = recipe.chain
    sha256 = verified_hash(recipe.base, hash_file=remembered_sha256)
    # The pooler is not part of the hash of the tensors.
    pooled = plan_head(recipe.head, recipe.config.depth).pooled
    tensors = (recipe.original_sha256 or saved.base_tensors_sha256) if not pooled else None
    return json.dumps([tensors or sha256, pooled and sha256, asdict(recipe.config)], sort_keys=True), sha256


def _outline(recipe: Recipe) -> FedEncoder:
    """Read the base encoder of a reader, without the tensors that belong to its graph."""
    config = recipe.config
    file = read_outline(recipe.base.weights, lambda name, shape: not is_kept(config, name, shape))
    return FedEncoder(config, pretrained_tensors(file, config))


def _read_feeds(recipe: Recipe, encoder: FedEncoder) -> tuple[Kind, dict[str, Any], SharedHead]:
    ((folder, saved),) = recipe.chain
    delta = read_tensor_files([folder / MODEL_WEIGHTS])
    head = build_shared_head(recipe.config, recipe.head, delta.under("head."), recipe.windows.max_seq_length)
    kind, feeds = encoder.feed(delta.under("encoder.model."), saved.tunings, highest=head.highest)
    return kind, feeds, head
