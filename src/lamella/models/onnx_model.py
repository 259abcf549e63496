"""Models as ONNX graphs, run by onnxruntime without torch or transformers; the format of exported folders.

config.json      format, the original model, windows, decoding, special tokens, positions, the effects of quantisation,
                 the hashes of the other files
model.onnx       encoder and head in one graph
tokenizer.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from lamella.config import WindowOptions
from lamella.data.windows.padding import Padded, check_window_length
from lamella.decoding_options import DecodingOptions
from lamella.encoder.sources import MODEL_CONFIG
from lamella.errors import ModelError
from lamella.files import file_sha256, read_json
from lamella.models.onnx_sessions import Cores, Sessions, explain_failure
from lamella.models.tokenizer_file import TOKENIZER, TokenizerFile, read_tokenizer
from lamella.section import Section
from lamella.user_cache import remembered_sha256

if TYPE_CHECKING:
    from lamella.graph.tuned_tensors import ParameterCounts

ONNX_FORMAT = "lamella_onnx"  # the key of config.json that marks an exported folder
ONNX_VERSION = 1
ONNX_GRAPH = "model.onnx"

Window = Mapping[str, NDArray[Any]]  # the inputs of one window, [1, T]

# The possible inputs of a graph. It has an input only if the encoder or the head reads it.
INPUTS: dict[str, Callable[[Padded], NDArray[Any]]] = {
    "input_ids": lambda padded: padded.input_ids,
    "attention_mask": lambda padded: padded.mask.astype(np.int64),
    "token_type_ids": lambda padded: padded.token_types,
    "is_context": lambda padded: padded.is_context,
}


class Identity(Section):
    """The model that a graph was exported from."""

    name: str
    sha256: str  # of its weights


class Measured(Section):
    """The effect of quantisation to int8 on the answers of a data file."""

    data: str
    questions: int
    equal: float  # share of the questions with the same answer as before
    metric: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """The change of the metric, negative for a loss."""
        return self.after - self.before


class Int8Parity(Section):
    """The largest differences of an int8 graph from the original model in torch, on a few sample questions."""

    questions: int
    logits: float
    null_odds: float


class ExportConfig(Section):
    """The config.json of an exported folder."""

    lamella_onnx: int = ONNX_VERSION
    source: Identity
    gives_text: bool
    windows: WindowOptions
    decoding: DecodingOptions
    cls_token_id: int
    pad_token_id: int
    positions: int | None = None  # of the encoder; None for some families, and in folders of older versions
    precision: Literal["fp32", "int8"] = "fp32"
    parity: float | None = None  # largest difference from torch's logits, before quantisation; None if not measured
    int8_parity: Int8Parity | None = None  # None in fp32, and in folders of older versions
    int8: Measured | None = None  # None if not measured
    sha256: dict[str, str] = Field(default={})  # of the other files, by name; empty in folders of older versions


class OnnxModel:
    """A reader as an ONNX graph. Threads may share it.

    Every window runs by itself, so that no padding is computed, and no answer depends on the rest of a batch: a few
    windows on several cores, many windows on a core each. These are two sessions; the second is opened when it is first
    needed. The logits are the same to the last bit.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        config: ExportConfig,
        tokenizer: TokenizerFile,
        graph: Path | bytes,
        *,
        threads: int | None = None,
        few_questions: bool = False,
    ) -> None:
        """Open a graph, a file or its bytes; `folders` are those that the model was read from.

        `few_questions` opens the session for a few windows instead of the one for many.
        """
        self.config, self.folders = config, tuple(folders)
        self.windows, self.decoding, self.gives_text = config.windows, config.decoding, config.gives_text
        self.precision, self.tokenizer = config.precision, tokenizer
        self.count_parameters: Callable[[], ParameterCounts | None] = lambda: None  # an exported folder does not say
        self.cores = Cores(threads)
        self.threads = self.cores.threads
        self._sessions = Sessions(graph, self.cores.sharing if few_questions else 1)
        self.inputs = self._sessions.inputs
        if unknown := set(self.inputs) - set(INPUTS):
            raise ModelError(
                f"{graph!s}: expected inputs among {', '.join(INPUTS)}, found {', '.join(sorted(unknown))}."
            )

    @classmethod
    def load(cls, folder: Path, **options: Any) -> OnnxModel:
        """Load an exported folder; `threads` defaults to the number of cores."""
        return cls.open(folder, read_export(folder), **options)

    @classmethod
    def open(cls, folder: Path, config: ExportConfig, **options: Any) -> OnnxModel:
        """Open the graph and the tokenizer of an exported folder, after a check of their hashes."""
        _check_files(folder, config.sha256)
        special = {"cls_token_id": config.cls_token_id, "pad_token_id": config.pad_token_id}
        tokenizer = TokenizerFile(read_tokenizer(folder), folder / TOKENIZER, **special)
        return cls([folder], config, tokenizer, folder / ONNX_GRAPH, **options)

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Return the logits of a padded batch; 0 at the padding."""
        logits = np.zeros((2, *padded.mask.shape) if self.gives_text else (2, len(padded.mask), 1), np.float32)
        for row, output in enumerate(self.window_logits(padded)):
            logits[:, row, : output.shape[1]] = output
        return logits  # [2, B, T], or [2, B, 1]

    def window_logits(self, padded: Padded) -> Iterator[NDArray[np.float32]]:
        """Yield the logits of each window without its padding, [2, T] or [2, 1], as soon as they are computed."""
        check_window_length(padded.mask.shape[1], self.config.positions)
        for output in self.cores.map(self._run, split_windows(padded, self.inputs)):
            yield output[:, 0]

    def logits_in_one_run(self, padded: Padded) -> NDArray[np.float32]:
        """Return the same from one run of the graph on the padded batch, as other programs would use it."""
        return self._run(1, {name: INPUTS[name](padded) for name in self.inputs})

    def _run(self, threads: int, window: Window) -> NDArray[np.float32]:
        with explain_failure(window["input_ids"].shape[1]):
            (output,) = self._sessions.get(threads).run(None, window)
        logits: NDArray[np.float32] = output
        return logits


def split_windows(padded: Padded, inputs: Iterable[str]) -> list[Window]:
    """Return these inputs of each window, [1, T], without the padding."""
    arrays = {name: INPUTS[name](padded) for name in inputs}
    lengths = padded.mask.sum(1)
    return [
        {name: array[row : row + 1, :length] for name, array in arrays.items()} for row, length in enumerate(lengths)
    ]


def hash_files(folder: Path) -> dict[str, str]:
    """Return the hashes of the files of an exported folder, except its config.json."""
    return {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name != MODEL_CONFIG}


def _check_files(folder: Path, expected: Mapping[str, str]) -> None:
    """Check that the files of an exported folder are those that were written."""
    for name, sha256 in expected.items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise ModelError(f"{path}: no such file; the exported folder is incomplete.")
        if (found := remembered_sha256(path)) != sha256:
            raise ModelError(
                f"{path}: expected sha256 {sha256[:12]}…, as recorded in {MODEL_CONFIG}, found {found[:12]}…; the file "
                "is damaged or was replaced: copy or export the model again."
            )


def is_exported(folder: Path) -> bool:
    """Return whether a folder holds an exported model."""
    path = folder / MODEL_CONFIG
    config = read_json(path) if path.is_file() else None
    return isinstance(config, dict) and ONNX_FORMAT in config


def read_export(folder: Path) -> ExportConfig:
    """Read and check the config.json of an exported folder."""
    path = folder / MODEL_CONFIG
    saved = read_json(path)
    version = saved.get(ONNX_FORMAT)
    if version != ONNX_VERSION:
        raise ModelError(
            f"{path}: expected export format {ONNX_VERSION}, got {version!r}; use another version of lamella."
        )
    try:
        return ExportConfig.model_validate(saved)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"{where}: {first['msg'].lower()}"
        raise ModelError(f"{path}: damaged, or written by another version of lamella: {problem}.") from None
