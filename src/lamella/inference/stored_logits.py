"""The logits of a run, kept for later: fp16, real tokens only, with the windows that they belong to.

    logits.safetensors   the logits [tokens, 2] of all windows one after the other, less the largest of each window
                         (`tops`, fp32); the arrays of the windows
    logits.json          questions and contexts, which model it was and how it decodes, the sha256 of the other file

Numbers near 0 are those that fp16 tells apart best, so that hardly anything is lost where answers are decided: a logit
100 below the best is off by 0.03 at most, one that is 1 below by 0.0005. With both files, answers can be decoded anew
without the model, its tokenizer or the data. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lamella.config import DecodingOptions
from lamella.data.examples import Context, Example
from lamella.data.feature_arrays import NAMES, from_arrays, text_places, to_arrays
from lamella.data.features import Features, PairTemplate, join_features
from lamella.data.padding import Padded
from lamella.errors import UnreadableError, UsageError
from lamella.files import file_sha256, read_json, write_bytes, write_entries
from lamella.inference.decode import mask_logits
from lamella.inference.protocols import AnswerSource
from lamella.runs import LOGITS, LOGITS_INDEX

FORMAT = 1
HALF_RANGE = float(np.finfo(np.float16).max)


class LogitsWriter:
    """Takes in logits while a model answers. It holds them all: with their windows, about 11 bytes a token."""

    def __init__(self, model: AnswerSource, record: Mapping[str, Any] | None = None) -> None:
        """`record` says which model it is, as `model_record` tells it."""
        if not model.gives_text:
            raise UsageError(
                "--keep-logits: expected a model that finds answers. Got one that only tells whether there is one; its "
                "null_odds.json holds all there is to keep."
            )
        self._decoding, self._record = model.decoding, record or {}
        self._parts: list[_Part] = []

    def add(self, features: Features, padded: Padded, logits: NDArray[Any]) -> None:
        """Keep what a model gave [2, B, T] for some windows of `features`; all of these come before any others."""
        if not self._parts or self._parts[-1].features is not features:
            self._parts.append(_Part.of(features))
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
            **({"model": _named(self._record)} if self._record else {}),
            "decoding": self._decoding.model_dump(),
            "max_seq_length": features.max_seq_length,
            "template": asdict(features.template),
            "contexts": [{"text": text, "title": title} for text, title in texts.items()],
            "questions": [
                {"id": one.id, "question": one.question, "context": place}
                for one, place in zip(features.examples, text_places(features.examples), strict=True)
            ],
        }
        write_entries(folder / LOGITS_INDEX, index)


class StoredLogits:
    """What was kept of a run: its windows, and the logits of any of them, read from the disk as they are asked for."""

    gives_text = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path, index = folder / LOGITS, read_json(folder / LOGITS_INDEX)
        try:
            if index["format"] != FORMAT:
                raise UnreadableError(
                    f"{folder / LOGITS_INDEX}: expected format {FORMAT}. Got {index['format']!r}, of another lamella."
                )
            self._file = cast(Any, safe_open(path, framework="numpy"))
            if "sha256" in index and index["sha256"] != file_sha256(path):  # it was not written before
                raise ValueError("the files do not belong together")
            self._logits, self.tops = self._file.get_slice("logits"), self._file.get_tensor("tops")
            self.decoding = DecodingOptions(**index["decoding"])
            self.model: dict[str, str] = dict(index.get("model", {}))  # name, base, sha256; empty: it was not recorded
            self.features = self._windows(index)
            shapes = (self._logits.get_shape(), list(self.tops.shape))
            if shapes != ([len(self.features.input_ids), 2], [len(self.features), 2]) or not _sound(self.features):
                raise ValueError("the logits are not those of the windows")
        except FileNotFoundError:
            raise UnreadableError(f"{path}: no such file, though {LOGITS_INDEX} is there.") from None
        except (KeyError, IndexError, TypeError, ValueError, SafetensorError, ValidationError):
            raise UnreadableError(
                f"{folder}: its kept logits are damaged, or {LOGITS} and {LOGITS_INDEX} are of two runs; predict again "
                "with --keep-logits."
            ) from None

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Those of some windows of `features`, [2, B, T]; pads have 0."""
        found = np.zeros((2, *padded.mask.shape), np.float32)
        for row, window in enumerate(padded.windows):
            begin, end = int(self.features.rows[window]), int(self.features.rows[window + 1])
            found[:, row, : end - begin] = self._logits[begin:end].T + self.tops[window][:, None]
        return found

    def of_tokens(self, begin: int, end: int) -> NDArray[np.float16]:
        """Those of some tokens of all windows, [tokens, 2], as they are kept: less the `tops` of their windows."""
        found: NDArray[np.float16] = self._logits[begin:end]
        return found

    def _windows(self, index: dict[str, Any]) -> Features:
        contexts = [Context(one["text"], one["title"]) for one in index["contexts"]]
        template: dict[str, Any] = {
            field.name: tuple(value) if isinstance(value := index["template"][field.name], list) else value
            for field in fields(PairTemplate)
        }
        return from_arrays(
            {name: self._file.get_tensor(name) for name in NAMES},
            [Example(one["id"], one["question"], contexts[one["context"]]) for one in index["questions"]],
            template=PairTemplate(**template),
            max_seq_length=index["max_seq_length"],
            lost_answers=0,
        )


def has_logits(folder: Path) -> bool:
    """Whether a run folder keeps logits."""
    return (folder / LOGITS_INDEX).is_file()


def same_windows(ours: Features, theirs: Features) -> bool:
    """Whether two sets of windows are the same, token by token and character by character.

    This is what combining logits needs, and all it needs: of two tokenizers that cut these texts alike, it is no matter
    how else they differ.
    """
    return (
        [(one.id, one.context.text) for one in ours.examples] == [(one.id, one.context.text) for one in theirs.examples]
        and ours.template.cls == theirs.template.cls
        and all(
            np.array_equal(getattr(ours, name), getattr(theirs, name))
            for name in ("rows", "example", "context_begin", "context_end", "first_token", "input_ids")
        )
        and all(np.array_equal(one, two) for one, two in zip(ours.offsets, theirs.offsets, strict=True))
    )


def _named(record: Mapping[str, Any]) -> dict[str, str]:
    """What of the record of a model tells it from others."""
    base = {"base": record["base"]["name"]} if "base" in record else {}
    return {"name": record["name"], **base, **({"sha256": record["sha256"]} if "sha256" in record else {})}


def _sound(features: Features) -> bool:
    """Whether windows can be those of their questions: every place in them is within what it is a place of."""
    begin, end, first = features.context_begin, features.context_end, features.first_token
    if {len(begin), len(end), len(first), len(features.rows) - 1} != {len(features)}:
        return False
    if (features.rows[0], features.rows[-1], len(features.max_context)) != (0, *2 * (len(features.input_ids),)):
        return False
    if not ((features.example >= 0) & (features.example < len(features.examples))).all():
        return False
    tokens = np.array([len(offsets) for offsets in features.offsets])[features.example]
    inside = (begin >= 0) & (begin <= end) & (end <= features.lengths) & (first >= 0) & (first + end - begin <= tokens)
    return bool(inside.all() and (features.lengths > features.template.cls).all())


@dataclass(frozen=True)
class _Part:
    """Windows that were cut together."""

    features: Features
    logits: NDArray[np.float16]  # [tokens, 2]
    tops: NDArray[np.float32]  # [windows, 2]

    @classmethod
    def of(cls, features: Features) -> _Part:
        logits, tops = np.zeros((len(features.input_ids), 2), np.float16), np.zeros((len(features), 2), np.float32)
        return cls(features, logits, tops)


def _join(parts: Sequence[Features]) -> Features:
    """The windows as if they had been cut at once: an example that reaches into a second part is listed once."""
    joined = join_features(parts)
    first: dict[str, int] = {}
    for example in joined.examples:
        first.setdefault(example.id, len(first))
    kept = {example.id: (example, offsets) for example, offsets in zip(joined.examples, joined.offsets, strict=True)}
    number = np.array([first[example.id] for example in joined.examples], np.int32)
    return replace(
        joined,
        examples=[kept[id][0] for id in first],
        offsets=[kept[id][1] for id in first],
        example=number[joined.example],
    )
