"""The logits of a run, stored in its folder: fp16, real tokens only, with their windows.

    logits.safetensors   the logits [tokens, 2] of all windows in sequence, minus the largest logit of each window
                         (`tops`, fp32); the arrays of the windows
    logits.json          questions and contexts, the model and its decoding options, the sha256 of the other file

fp16 is most precise near 0, so little is lost where answers are decided: a logit 100 below the best is off by at most
0.03, a logit 1 below by 0.0005. With both files, answers can be decoded again without the model, its tokenizer or the
data. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lamella.data.examples import Context, Example
from lamella.data.windows.feature_arrays import NAMES, context_indices, from_arrays, to_arrays
from lamella.data.windows.features import Features, PairTemplate, join_features
from lamella.data.windows.padding import Padded
from lamella.decoding_options import DecodingOptions
from lamella.errors import UnreadableError, UsageError, shorten
from lamella.files import file_sha256, read_json, write_bytes, write_entries
from lamella.inference.decode import mask_logits
from lamella.inference.protocols import AnswerSource
from lamella.runs import LOGITS, LOGITS_INDEX

FORMAT = 1
HALF_RANGE = float(np.finfo(np.float16).max)


class LogitsWriter:
    """Collects logits while a model answers, and writes them. It holds all of them: about 11 bytes per token, with the
    windows."""

    def __init__(self, model: AnswerSource, record: Mapping[str, Any] | None = None) -> None:
        """`record` identifies the model; see `model_record`."""
        if not model.gives_text:
            raise UsageError(
                "--keep-logits: expected a model that finds answers, got one that only decides whether there is one; "
                "null_odds.json already holds its scores."
            )
        self._decoding, self._record = model.decoding, record or {}
        self._parts: list[_Part] = []

    def add(self, features: Features, padded: Padded, logits: NDArray[Any]) -> None:
        """Add the logits [2, B, T] of some windows. Add all windows of one `features` before those of another."""
        if not self._parts or self._parts[-1].features is not features:
            self._parts.append(_Part.for_features(features))
        part = self._parts[-1]
        tops = mask_logits(logits, padded).max(axis=2).astype(np.float32)  # [2, B]
        part.tops[padded.windows] = tops.T
        halves = np.clip(logits - tops[:, :, None], -HALF_RANGE, HALF_RANGE).astype(np.float16)
        for row, window in enumerate(padded.windows):
            begin, end = features.rows[window], features.rows[window + 1]
            part.logits[begin:end] = halves[:, row, : end - begin].T

    def write(self, folder: Path) -> None:
        """Write both files into a run folder."""
        features = _join([part.features for part in self._parts])
        texts = {example.context.text: example.context.title for example in features.examples}
        arrays = to_arrays(features) | {
            "logits": np.concatenate([part.logits for part in self._parts]),
            "tops": np.concatenate([part.tops for part in self._parts]),
        }
        data = save(arrays)
        write_bytes(folder / LOGITS, data)
        index = {
            "format": FORMAT,
            "sha256": hashlib.sha256(data).hexdigest(),
            **({"model": _identity(self._record)} if self._record else {}),
            "decoding": self._decoding.model_dump(),
            "max_seq_length": features.max_seq_length,
            "template": asdict(features.template),
            "contexts": [{"text": text, "title": title} for text, title in texts.items()],
            "questions": [
                {"id": example.id, "question": example.question, "context": index}
                for example, index in zip(features.examples, context_indices(features.examples), strict=True)
            ],
        }
        write_entries(folder / LOGITS_INDEX, index)


class StoredLogits:
    """The stored windows of a run, and their logits, which are read from disk on demand."""

    gives_text = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path, table = folder / LOGITS, read_json(folder / LOGITS_INDEX)
        if isinstance(table, dict) and table.get("format", FORMAT) != FORMAT:
            raise UnreadableError(
                f"{folder / LOGITS_INDEX}: expected format {FORMAT}, got {shorten(table['format'])}, written by "
                "another version of lamella; predict again with --keep-logits."
            )
        try:
            index = _INDEX.validate_python(table)
            self._file = cast(Any, safe_open(path, framework="numpy"))
            if index.sha256 not in (None, file_sha256(path)):
                raise ValueError("the files do not belong together")
            self._logits, self.tops = self._file.get_slice("logits"), self._file.get_tensor("tops")
            self.decoding = index.decoding
            self.model = index.model
            self.features = self._windows(index)
            shapes = (self._logits.get_shape(), list(self.tops.shape))
            if shapes != ([len(self.features.input_ids), 2], [len(self.features), 2]) or not _is_consistent(
                self.features
            ):
                raise ValueError("the logits do not match the windows")
        except FileNotFoundError:
            raise UnreadableError(
                f"{path}: no such file, although {LOGITS_INDEX} exists; predict again with --keep-logits."
            ) from None
        except (KeyError, IndexError, TypeError, ValueError, SafetensorError, ValidationError, OSError):
            raise UnreadableError(
                f"{folder}: its stored logits are damaged, or {LOGITS} and {LOGITS_INDEX} belong to different runs; "
                "predict again with --keep-logits."
            ) from None

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Return the logits [2, B, T] of some windows of `features`; 0 at padding."""
        logits = np.zeros((2, *padded.mask.shape), np.float32)
        for row, window in enumerate(padded.windows):
            begin, end = int(self.features.rows[window]), int(self.features.rows[window + 1])
            logits[:, row, : end - begin] = self._logits[begin:end].T + self.tops[window][:, None]
        return logits

    def of_tokens(self, begin: int, end: int) -> NDArray[np.float16]:
        """Return the logits [tokens, 2] of a range of tokens as they are stored: minus the `tops` of their windows."""
        logits: NDArray[np.float16] = self._logits[begin:end]
        return logits

    def _windows(self, index: _Index) -> Features:
        return from_arrays(
            {name: self._file.get_tensor(name) for name in NAMES},
            [Example(row.id, row.question, index.contexts[row.context]) for row in index.questions],
            template=index.template,
            max_seq_length=index.max_seq_length,
            lost_answers=0,
        )


@dataclass(frozen=True)
class _Question:
    id: str
    question: str
    context: NonNegativeInt


@dataclass(frozen=True)
class _Index:
    """The contents of logits.json."""

    decoding: DecodingOptions
    max_seq_length: PositiveInt
    template: PairTemplate
    contexts: list[Context]
    questions: list[_Question]
    model: dict[str, str] = field(default_factory=dict)  # name, base, sha256; empty if not recorded
    sha256: str | None = None  # older files have none


_INDEX = TypeAdapter(_Index)


def has_logits(folder: Path) -> bool:
    """Return whether a run folder holds logits."""
    return (folder / LOGITS_INDEX).is_file()


def same_windows(first: Features, second: Features) -> bool:
    """Return whether two sets of windows are equal, token by token and character by character.

    Combining logits needs this and nothing more: two tokenizers that split these texts alike may differ otherwise.
    """
    return (
        _texts_of(first) == _texts_of(second)
        and first.template.cls == second.template.cls
        and all(
            np.array_equal(getattr(first, name), getattr(second, name))
            for name in ("rows", "example", "context_begin", "context_end", "first_token", "input_ids")
        )
        and all(np.array_equal(*offsets) for offsets in zip(first.offsets, second.offsets, strict=True))
    )


def _texts_of(features: Features) -> list[tuple[str, str]]:
    return [(example.id, example.context.text) for example in features.examples]


def _identity(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the part of a model's record that identifies it."""
    base = {"base": record["base"]["name"]} if "base" in record else {}
    return {"name": record["name"], **base, **({"sha256": record["sha256"]} if "sha256" in record else {})}


def _is_consistent(features: Features) -> bool:
    """Return whether every index in the windows lies within the array that it points into."""
    begin, end, first = features.context_begin, features.context_end, features.first_token
    if {len(begin), len(end), len(first), len(features.rows) - 1} != {len(features)}:
        return False
    if (features.rows[0], features.rows[-1], len(features.max_context)) != (0, *2 * (len(features.input_ids),)):
        return False
    if not ((features.example >= 0) & (features.example < len(features.examples))).all():
        return False
    longest, most = features.lengths.max(initial=0), np.iinfo(np.int32).max
    if longest > features.max_seq_length or not 0 <= features.template.pad_id <= most:
        return False
    tokens = np.array([len(offsets) for offsets in features.offsets])[features.example]
    inside = (begin >= 0) & (begin <= end) & (end <= features.lengths) & (first >= 0) & (first + end - begin <= tokens)
    return bool(inside.all() and (features.lengths > features.template.cls).all())


@dataclass(frozen=True)
class _Part:
    """The windows of one `Features`, with their logits."""

    features: Features
    logits: NDArray[np.float16]  # [tokens, 2]
    tops: NDArray[np.float32]  # [windows, 2]

    @classmethod
    def for_features(cls, features: Features) -> _Part:
        logits, tops = np.zeros((len(features.input_ids), 2), np.float16), np.zeros((len(features), 2), np.float32)
        return cls(features, logits, tops)


def _join(parts: Sequence[Features]) -> Features:
    """Join windows as if they had been made in one go: an example split over two parts is listed once."""
    joined = join_features(parts)
    first: dict[str, int] = {}
    for example in joined.examples:
        first.setdefault(example.id, len(first))
    unique = {example.id: (example, offsets) for example, offsets in zip(joined.examples, joined.offsets, strict=True)}
    number = np.array([first[example.id] for example in joined.examples], np.int32)
    return replace(
        joined,
        examples=[unique[id][0] for id in first],
        offsets=[unique[id][1] for id in first],
        example=number[joined.example],
    )
