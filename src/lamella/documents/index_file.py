"""The index of a folder on disk: texts, passages and word scores in one safetensors file, replaced as a whole.

A file that is being written has another name until it is complete, so a process that is killed leaves the old index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.word_ranking import ScoreMatrix, Sliced
from lamella.documents.passages import PassageIndex
from lamella.errors import DataError, counted, printable, shorten
from lamella.files import write_bytes

INDEX = ".lamella-index.safetensors"
FORMAT = "lamella-documents 6"  # a change of texts, of how passages are cut or words are numbered needs another number
HASHED = 1 << 20  # rows of a tensor that are in memory at a time while it is hashed
LAYOUT = {  # the type and the number of dimensions of each tensor
    "documents": ("U8", 1),
    "texts": ("U8", 1),
    "text_ends": ("I64", 1),
    "spans": ("I64", 2),
    "passage_ends": ("I64", 1),
    "terms": ("I32", 1),
    "term_ends": ("I64", 1),
    "vocabulary": ("U8", 1),
    "scores": ("F32", 1),
    "scored": ("I32", 1),
    "score_begins": ("I64", 1),
}


@dataclass(frozen=True)
class DocumentRecord:
    """What is known about a file besides its text; a file that could not be read has a `problem` instead."""

    name: str
    state: tuple[int, ...]  # size and times of the file when it was read; none if it must be read again
    kind: str = ""
    pages: tuple[int, ...] = ()
    problem: str = ""
    encoding: str | None = None  # that was asked for


@dataclass(frozen=True)
class Terms:
    """The terms of the passages of a document, numbered by a vocabulary."""

    numbers: NDArray[np.int32]
    ends: NDArray[np.int64]  # of each passage, in `numbers`
    vocabulary: Collection[str]


class StoredIndex:
    """An index on disk, which is read as far as it is needed."""

    def __init__(self, path: Path) -> None:
        """Open an index; raise ValueError if it is damaged or of another format.

        Everything is hashed, and all numbers are checked, so that no later read can fail: 46 MB take 0.05 seconds.
        """
        from safetensors import SafetensorError, safe_open

        open_file: Any = safe_open  # it has no types
        try:
            self._path, self._folder = printable(str(path)), printable(str(path.parent))
            self._file = open_file(path, framework="numpy")
            metadata = self._file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError("has another format")
            slices = {name: self._file.get_slice(name) for name in self._file.offset_keys()}
            if metadata.get("sha256") != _sha256({name: (part.get_shape()[0], part) for name, part in slices.items()}):
                raise ValueError("is damaged")
            _check_layout(slices)
            self.records = [_read_record(record) for record in json.loads(self._bytes("documents"))]
            self._text_ends, self._passage_ends, self.spans, self._term_ends = map(
                self._file.get_tensor, ("text_ends", "passage_ends", "spans", "term_ends")
            )
            words = self._bytes("vocabulary").decode("utf-8")
            self.vocabulary = words.split("\n") if words else []
            self.matrix = ScoreMatrix(slices["scores"], slices["scored"], self._file.get_tensor("score_begins"))
            self._texts, self._terms = slices["texts"], slices["terms"]
            self._check_numbers({name: part.get_shape()[0] for name, part in slices.items()})
        except (SafetensorError, OSError, TypeError, KeyError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(str(error)) from None

    def text(self, number: int) -> str:
        """Return the text of a document."""
        begin, end = self._range(self._text_ends, number)
        try:
            return bytes(self._texts[begin:end]).decode("utf-8") if end > begin else ""
        except UnicodeDecodeError:  # only in an index that was made by hand; decoding all texts at once would take long
            name = printable(self.records[number].name)
            advice = f"replace it with: lamella index {self._folder}"
            raise DataError(f"{self._path}: the text of {name} is not UTF-8; {advice}") from None

    def spans_of(self, number: int) -> NDArray[np.int64]:
        """Return begin and end of the passages of a document."""
        begin, end = self._range(self._passage_ends, number)
        spans: NDArray[np.int64] = self.spans[begin:end]
        return spans

    def terms_of(self, number: int) -> Terms:
        """Return the terms of the passages of a document."""
        first, last = self._range(self._passage_ends, number)
        begin = int(self._term_ends[first - 1]) if first else 0
        ends = self._term_ends[first:last]
        end = int(ends[-1]) if len(ends) else begin
        numbers = self._terms[begin:end] if end > begin else np.zeros(0, np.int32)
        return Terms(numbers, ends - begin, self.vocabulary)

    def _check_numbers(self, lengths: Mapping[str, int]) -> None:
        """Check that all numbers are within what they refer to; the hash of an index made by hand may be right."""
        counts = {
            "text_ends": (self._text_ends, len(self.records), lengths["texts"]),
            "passage_ends": (self._passage_ends, len(self.records), lengths["spans"]),
            "term_ends": (self._term_ends, lengths["spans"], lengths["terms"]),
            "score_begins": (self.matrix.begins[1:], len(self.vocabulary), lengths["scores"]),
        }
        for name, (ends, count, last) in counts.items():
            if len(ends) != count or np.any(np.diff(ends, prepend=0) < 0) or (ends[-1] if count else 0) != last:
                raise ValueError(f"{name}: expected {count} places that rise to {last}")
        if self.matrix.begins[0] != 0 or lengths["scored"] != lengths["scores"]:
            raise ValueError("scores: expected as many numbers of passages, from 0")
        for name, numbers, most in (
            ("scored", self.matrix.texts, lengths["spans"]),
            ("terms", self._terms, len(self.vocabulary)),
        ):
            for begin in range(0, lengths[name], HASHED):
                part = np.asarray(numbers[begin : min(begin + HASHED, lengths[name])])
                if part.min() < 0 or part.max() >= most:
                    raise ValueError(f"{name}: expected numbers below {most}")
        longest = np.repeat(np.diff(self._text_ends, prepend=0), np.diff(self._passage_ends, prepend=0))
        begins, ends = self.spans.T
        if np.any(begins < 0) or np.any(begins > ends) or np.any(ends > longest):  # characters are at least a byte
            raise ValueError("spans: expected places within the texts")

    @staticmethod
    def _range(ends: NDArray[np.int64], number: int) -> tuple[int, int]:
        return int(ends[number - 1]) if number else 0, int(ends[number])

    def _bytes(self, name: str) -> bytes:
        return bytes(self._file.get_tensor(name))


def write_index(
    path: Path,
    records: Sequence[DocumentRecord],
    passages: PassageIndex,
    terms: Sequence[Sequence[int]],
) -> None:
    """Write an index into a folder that is locked.

    `terms` are the numbers of the terms of each passage in the vocabulary of its ranking.
    """
    from safetensors.numpy import save

    texts = [text.encode("utf-8") for text in passages.texts]
    ranking = passages.ranking
    numbers = np.fromiter(chain(*terms), np.int32)
    counts = np.bincount(passages.places[:, 0], minlength=len(records))
    tensors: dict[str, NDArray[Any]] = {
        "documents": _as_bytes(json.dumps([asdict(record) for record in records]).encode("utf-8")),
        "texts": _as_bytes(b"".join(texts)),
        "text_ends": np.cumsum([len(text) for text in texts], dtype=np.int64),
        "spans": np.ascontiguousarray(passages.places[:, 1:]),
        "passage_ends": np.cumsum(counts, dtype=np.int64),
        "terms": numbers,
        "term_ends": np.cumsum([len(passage) for passage in terms], dtype=np.int64),
        "vocabulary": _as_bytes("\n".join(ranking.vocabulary).encode("utf-8")),
        "scores": ranking.matrix.scores[:],
        "scored": ranking.matrix.texts[:],
        "score_begins": ranking.matrix.begins,
    }
    sha256 = _sha256({name: (len(tensor), tensor) for name, tensor in tensors.items()})
    data = save(tensors, metadata={"format": FORMAT, "sha256": sha256})
    write_bytes(path, data, private=True)  # it contains the texts of files that others may not read


def _sha256(tensors: Mapping[str, tuple[int, Sliced[Any]]]) -> str:
    """Return the hash of tensors with their names and types, each given with its length."""
    digest = hashlib.sha256()
    for name, (length, tensor) in sorted(tensors.items()):
        digest.update(f"{name} {length}\n".encode())
        for begin in range(0, length, HASHED):
            part = np.ascontiguousarray(tensor[begin : min(begin + HASHED, length)])
            digest.update(f"{part.dtype} {part.shape}\n".encode())
            digest.update(part.data)
    return digest.hexdigest()


def _check_layout(slices: Mapping[str, Any]) -> None:
    if slices.keys() != LAYOUT.keys():
        raise ValueError(f"expected the tensors {', '.join(LAYOUT)}, found {', '.join(sorted(slices)) or 'none'}")
    for name, (kind, dimensions) in LAYOUT.items():
        found, shape = slices[name].get_dtype(), slices[name].get_shape()
        if found != kind or len(shape) != dimensions or shape[1:] not in ([], [2]):
            raise ValueError(f"{name}: expected {kind} in {counted(dimensions, 'dimension')}, found {found} {shape}")


def _read_record(values: Any) -> DocumentRecord:
    record = DocumentRecord(**{key: _as_tuple(value) for key, value in values.items()})
    texts = (record.name, record.kind, record.problem, record.encoding or "")
    numbers = (record.state, record.pages)
    if not all(isinstance(text, str) for text in texts) or not all(
        isinstance(part, tuple) and all(isinstance(number, int) for number in part) for part in numbers
    ):
        raise ValueError(f"documents: expected a record of a document, found {shorten(values)}")
    return record


def _as_bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
