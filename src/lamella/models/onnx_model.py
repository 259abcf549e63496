"""Exported models, run by onnxruntime: neither torch nor transformers is needed, or imported.

config.json      format, where the model came from, windows, decoding, special tokens, positions, what quantisation cost
model.onnx       encoder and head in one graph
tokenizer.json
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from tokenizers import Tokenizer

from lamella.config import DecodingOptions, Section, WindowOptions
from lamella.data.padding import Padded, check_window_length
from lamella.encoder.sources import MODEL_CONFIG
from lamella.errors import MissingExtraError, ModelError, one_line
from lamella.files import read_json

ONNX_FORMAT = "lamella_onnx"  # the key by which exported folders are told from others
ONNX_VERSION = 1
ONNX_GRAPH = "model.onnx"
TOKENIZER = "tokenizer.json"

# What a graph may ask for. It has an input only where the encoder or the head reads it.
INPUTS: dict[str, Callable[[Padded], NDArray[Any]]] = {
    "input_ids": lambda padded: padded.input_ids,
    "attention_mask": lambda padded: padded.mask.astype(np.int64),
    "token_type_ids": lambda padded: padded.token_types,
    "is_context": lambda padded: padded.is_context,
}

# On a CPU, onnxruntime's joint kernels take longer than the separate ones do: the first of them three times as long.
SLOW_FUSIONS = ("SkipLayerNormFusion", "BiasGeluFusion")


class Identity(Section):
    """Which model a graph was made from."""

    name: str
    sha256: str  # of its weights


class Measured(Section):
    """What rounding to int8 did to the answers of a data file."""

    data: str
    questions: int
    equal: float  # the share of questions that are answered as before
    metric: str
    before: float
    after: float

    @property
    def lost(self) -> float:
        return self.before - self.after


class ExportConfig(Section):
    """The config.json of an exported folder."""

    lamella_onnx: int = ONNX_VERSION
    source: Identity
    gives_text: bool
    windows: WindowOptions
    decoding: DecodingOptions
    cls_token_id: int
    pad_token_id: int
    positions: int | None = None  # of the encoder; not known of some families, and in folders that were written before
    precision: Literal["fp32", "int8"] = "fp32"
    parity: float  # the largest difference from torch's logits that was seen at export, before any rounding
    int8: Measured | None = None  # nothing where it was not measured


class TokenizerFile:
    """A tokenizer from its tokenizer.json alone."""

    def __init__(self, path: Path, config: ExportConfig) -> None:
        if not path.is_file():
            raise ModelError(f"{path}: no such file; the exported folder is incomplete.")
        try:
            self.backend_tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for whatever is wrong with the file
            raise ModelError(f"{path}: expected a tokenizer; it is damaged ({one_line(error)}).") from None
        self.cls_token_id, self.pad_token_id, self.name_or_path = config.cls_token_id, config.pad_token_id, str(path)


class OnnxModel:
    """A graph that answers. Threads may share it.

    Every window is run by itself, each core taking the next one: that needs no padding, waits for nobody, keeps what it
    computes in the cache, and in int8, where a run has one scale for all, makes no answer depend on its neighbours.
    """

    def __init__(self, folder: Path, config: ExportConfig, *, graph: str = ONNX_GRAPH, threads: int | None = None):
        self.config, self.folders = config, (folder,)
        self.windows, self.decoding, self.gives_text = config.windows, config.decoding, config.gives_text
        self.tokenizer = TokenizerFile(folder / TOKENIZER, config)
        self._session = _open(folder / graph)
        self._pool = ThreadPoolExecutor(threads or _cores(), "lamella-onnx")
        self.inputs = [one.name for one in self._session.get_inputs()]
        if unknown := set(self.inputs) - set(INPUTS):
            raise ModelError(f"{folder / graph}: asks for {', '.join(sorted(unknown))}, which no window has.")

    @classmethod
    def load(cls, folder: Path, *, threads: int | None = None) -> OnnxModel:
        """Load an exported folder; `threads` are as many as there are cores unless said otherwise."""
        return cls(folder, read_export(folder), threads=threads)

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """The logits of some windows; 0 at their pads."""
        check_window_length(padded, self.config.positions)
        feed = self._feed(padded)
        lengths = padded.mask.sum(1)
        alone = [
            {name: array[row : row + 1, :length] for name, array in feed.items()} for row, length in enumerate(lengths)
        ]
        found = list(self._pool.map(self._run, alone))
        logits = np.zeros((2, len(alone), padded.mask.shape[1] if self.gives_text else 1), np.float32)
        for row, one in enumerate(found):
            logits[:, row, : one.shape[2]] = one[:, 0]
        return logits  # [2, B, T], or [2, B, 1]

    def logits_in_one_run(self, padded: Padded) -> NDArray[np.float32]:
        """The same from one run of the graph, with the padding: what other programs would do with it."""
        return self._run(self._feed(padded))

    def _feed(self, padded: Padded) -> dict[str, NDArray[Any]]:
        return {name: INPUTS[name](padded) for name in self.inputs}

    def _run(self, feed: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        try:
            (found,) = self._session.run(None, feed)
        except Exception as error:  # onnxruntime has a class for every kind of failure, none of them a MemoryError
            if "allocate memory" in str(error):
                raise MemoryError(one_line(error)) from None
            tokens = feed["input_ids"].shape[1]
            raise ModelError(f"the exported graph cannot be run on {tokens} tokens: {one_line(error)}.") from None
        logits: NDArray[np.float32] = found
        return logits


def is_exported(folder: Path) -> bool:
    """Whether a folder holds an exported model."""
    path = folder / MODEL_CONFIG
    config = read_json(path) if path.is_file() else None
    return isinstance(config, dict) and ONNX_FORMAT in config


def read_export(folder: Path) -> ExportConfig:
    """The configuration of an exported folder; one that is damaged or of another version is refused."""
    path = folder / MODEL_CONFIG
    saved = read_json(path)
    version = saved.get(ONNX_FORMAT)
    if version != ONNX_VERSION:
        raise ModelError(f"{path}: expected export format {ONNX_VERSION}. Got {version!r}, of another lamella.")
    try:
        return ExportConfig.model_validate(saved)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelError(f"{path}: is damaged, or of another lamella: {where}: {first['msg'].lower()}.") from None


def _cores() -> int:
    """Those that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open(graph: Path) -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise MissingExtraError("a model that was exported to ONNX", "onnx") from None
    if not graph.is_file():
        raise ModelError(f"{graph}: no such file; the exported folder is incomplete.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # of a single run; several go on at once
    options.log_severity_level = 4  # what is worth a warning was seen at export, and an error is raised
    try:
        return onnxruntime.InferenceSession(
            str(graph), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(SLOW_FUSIONS)
        )
    except Exception as error:  # as above
        raise ModelError(f"{graph}: expected an ONNX graph; it is damaged ({one_line(error)}).") from None
