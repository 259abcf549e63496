"""A cache folder: the hidden states that a frozen encoder computed for some windows, readable in any order.

    index.json           what was extracted, from which data and how; the shards with their sizes and hashes
    extracting.json      the same during extraction: a shard without a hash is not written yet
    train-00000.states   a shard: some windows of a split, without padding, the longest windows first

A shard is an array of rows of H numbers, little-endian, layer after layer (`[L, tokens, H]`). Before it come the pooled
outputs, if stored, one row per window; before all rows, for int8, the scale of each row.

Why layer after layer: a batch reads a run of tokens from each of its layers. From memory, the orders `[tokens, L, H]`,
`[L, tokens, H]` per window and `[L, tokens, H]` per shard take the same time (1,200 windows, 6 layers of 384 in fp16).
From a disk, one layer of the six takes 1.2, 1.1 and 0.5 s, and all six 3.7, 2.9 and 2.9 s: with the last order, the
system reads ahead within the same layer, which a later batch needs. Why the longest windows first: neighbours have
similar lengths, so that a batch of the encoder has hardly any padding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from lamella.config import POOLED
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.storage import SCALE_BYTES, TYPES, Storage, decode
from lamella.errors import RunError, UsageError, counted
from lamella.files import file_sha256, read_json
from lamella.progress import progress

if TYPE_CHECKING:
    from lamella.data.windows.batches import Batch
    from lamella.data.windows.features import Features
    from lamella.data.windows.padding import Indices

FORMAT, FORMAT_VERSION = "lamella_cache", 1
INDEX = "index.json"
PROGRESS = "extracting.json"


def open_cache(folder: Path, *, identity: Mapping[str, Any], verify: bool = False) -> Cache:
    """Open a finished cache that was extracted with this identity.

    The sizes of the shards are always checked, their hashes only with `verify`, as that reads every byte. Extracting
    again checks the hashes too, and repairs damaged shards.
    """
    if not (folder / INDEX).is_file():
        if (folder / PROGRESS).is_file():
            raise RunError(f"{folder}: the extraction is not finished; run `lamella extract` again to continue.")
        raise UsageError(f"{folder}: expected a cache of hidden states (a folder with {INDEX}), found none.")
    index = Index.read(folder / INDEX)
    mismatch = difference(index.identity, as_json(identity))
    if mismatch:
        key, cached, expected = mismatch
        raise RunError(f"{folder}: expected a cache with {key} {expected}, found {cached}; extract another.")
    with progress("checking the cache", len(index.shards)) as advance:
        for shard in index.shards:
            fault = shard.fault(folder, verify=verify)
            if fault:
                raise RunError(f"{folder / shard.file}: {fault}; run `lamella extract` again to repair it.")
            advance()
    return Cache(folder, index)


class Cache:
    """A finished cache."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index

    def require(self, layers: Sequence[int]) -> None:
        """Check that all these layers are stored."""
        missing = sorted(set(layers).difference(self.index.layers))
        if missing:
            raise RunError(
                f"{self.folder}: expected {layers_in_words(missing)}, found {layers_in_words(self.index.layers)}; "
                f"extract all layers that the learners read."
            )

    def source(self, features: Features) -> CachedStates:
        """Return the states of these windows, which must equal an extracted split."""
        description = describe_windows(features)
        for name, split in self.index.splits.items():
            if split == description:
                shards = self.index.shards_of(name, features.lengths, self.folder)
                return CachedStates(self.folder, self.index, shards, features.lengths)
        splits = ", ".join(
            f"{name} ({counted(split['windows'], 'window')})" for name, split in self.index.splits.items()
        )
        raise RunError(
            f"{self.folder}: expected the {counted(len(features), 'window')} of this run, found {splits} of other "
            "data or with other window options; extract them."
        )


class CachedStates:
    """The states of a split; called in the same way as an encoder."""

    def __init__(self, folder: Path, index: Index, shards: Sequence[Shard], lengths: Indices) -> None:
        order = stored_order(lengths)
        self._folder, self._index, self._lengths = folder, index, lengths
        self._place = np.argsort(order)  # position of each window in the stored order
        self._first_token = np.append(0, np.cumsum(lengths[order]))  # of each position, within the split
        self._begins = np.array([shard.begin for shard in shards], np.int64)
        self._shards = [
            index.parts(_map(folder / shard.file, shard.bytes), lengths[order[shard.begin : shard.end]])
            for shard in shards
        ]

    def __call__(self, batch: Batch, layers: Sequence[int]) -> HiddenStates:
        """Return the hidden states of a batch as fp32 on its device, zero at the padding."""
        Cache(self._folder, self._index).require(layers)
        states = {layer: self._gather(batch, layer) for layer in set(layers)}
        numbers = tuple(layer for layer in layers if layer != POOLED)
        pooled = states[POOLED][:, 0] if POOLED in layers else None
        chosen = tuple(states[layer] for layer in numbers)
        return HiddenStates(chosen, batch.mask, batch.is_context, pooled, numbers)

    def _gather(self, batch: Batch, layer: int) -> Tensor:
        """Return one layer of a batch, [B, T, H]; the pooled output is a layer with one token.

        numpy copies the stored bytes, and the device converts them all at once. Converting while copying would save one
        pass over the bytes, but torch would start its threads for each of many small copies: on a busy machine they
        wait for one another, which takes several times as long.
        """
        device, storage = batch.input_ids.device, self._index.storage
        count, width = batch.input_ids.shape
        places = self._place[batch.windows]
        numbers = np.searchsorted(self._begins, places, side="right") - 1
        firsts = self._begins[numbers]  # first position in the shard of each window
        if layer == POOLED:
            width, begins, lengths = 1, places - firsts, np.ones_like(places)
        else:
            begins = self._first_token[places] - self._first_token[firsts]
            lengths = self._lengths[batch.windows]

        pin = device.type == "cuda"
        values = torch.empty(count, width, self._index.hidden_size, dtype=TYPES[storage], pin_memory=pin)
        scales = torch.zeros(count, width, pin_memory=pin) if storage == "int8" else None
        into = values.view(torch.uint8).numpy()
        runs = zip(numbers.tolist(), begins.tolist(), lengths.tolist(), strict=True)
        for row, (number, begin, length) in enumerate(runs):
            shard = self._shards[number]
            first = shard.first_row[layer] + begin
            into[row, :length] = shard.values[first : first + length]
            into[row, length:] = 0
            if scales is not None and shard.scales is not None:
                scales.numpy()[row, :length] = shard.scales[first : first + length]
        values = values.to(device, non_blocking=True)
        return decode(values, None if scales is None else scales.to(device, non_blocking=True))


Sum = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Shard:
    """A file with the windows `begin` to `end` of a split; the fields after `bytes` are set once it is written."""

    # Inside the folder only: old shards are removed by this name.
    file: Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f]+$")]
    split: str
    begin: int
    end: int
    bytes: int
    sha256: str | None = None
    squares: tuple[Sum, ...] = ()  # per layer: the sum of the squared values, and of their squared rounding errors
    squared_errors: tuple[Sum, ...] = ()
    clamped: int = 0  # number of values outside the range of the number format

    def fault(self, folder: Path, *, verify: bool) -> str | None:
        """Return what is wrong with the file; None if it is intact."""
        path = folder / self.file
        if not path.is_file():
            return "is missing"
        size = path.stat().st_size
        if size != self.bytes:
            return f"expected {self.bytes} bytes, found {size}"
        if verify and file_sha256(path) != self.sha256:
            return "has changed since it was written (the sha256 differs)"
        return None


@dataclass(frozen=True)
class Parts:
    """The contents of a shard, as views of its bytes."""

    values: NDArray[np.uint8]  # [rows, bytes of H numbers]
    scales: NDArray[np.float32] | None  # [rows]
    first_row: dict[int, int]  # of each layer


class Windows(TypedDict):
    """A description that identifies the windows of a split."""

    windows: int
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """The contents of index.json or extracting.json."""

    identity: dict[str, Any]
    storage: Storage
    precision: str  # of the encoder
    layers: tuple[int, ...]  # sorted; POOLED, if stored, comes first
    hidden_size: int
    splits: dict[str, Windows]
    shards: tuple[Shard, ...]

    @property
    def finished(self) -> bool:
        return all(shard.sha256 is not None for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(split["tokens"] for split in self.splits.values())

    @property
    def errors(self) -> dict[int, float]:
        """Per layer: RMS of the rounding errors over RMS of the values."""
        errors = {}
        for position, layer in enumerate(self.layers):
            square = sum(shard.squares[position] for shard in self.shards)
            error = sum(shard.squared_errors[position] for shard in self.shards)
            errors[layer] = math.sqrt(error / square) if square else 0.0
        return errors

    @property
    def options(self) -> dict[str, Any]:
        """Everything that determines the stored states; the division into shards does not."""
        return {key: value for key, value in self.to_json().items() if key != "shards"}

    def shards_of(self, split: str, lengths: Indices, folder: Path) -> list[Shard]:
        """Return the shards of a split; raise an error if they do not fit windows of these lengths."""
        shards, order = [shard for shard in self.shards if shard.split == split], stored_order(lengths)
        begins, ends = [shard.begin for shard in shards], [0, *(shard.end for shard in shards)]
        rows = [int(self.rows(lengths[order[shard.begin : shard.end]]).sum()) for shard in shards]
        fits = begins == ends[:-1] and ends[-1] == len(lengths)
        if not fits or [count * self.row_bytes for count in rows] != [shard.bytes for shard in shards]:
            raise RunError(f"{folder / INDEX}: damaged at shards; remove {folder} and extract again.")
        return shards

    def rows(self, lengths: Indices) -> Indices:
        """Return the number of rows of windows of these lengths: one per token and layer, one for the pooled output."""
        pooled = POOLED in self.layers
        return lengths * (len(self.layers) - pooled) + pooled

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * TYPES[self.storage].itemsize + (SCALE_BYTES if self.storage == "int8" else 0)

    def parts(self, data: NDArray[np.uint8], lengths: Indices) -> Parts:
        """Return views of the bytes of a shard, given the lengths of its windows."""
        first_row, rows = {}, 0
        for layer in self.layers:
            first_row[layer] = rows
            rows += len(lengths) if layer == POOLED else int(lengths.sum())
        header = rows * SCALE_BYTES if self.storage == "int8" else 0
        return Parts(data[header:].reshape(rows, -1), data[:header].view("<f4") if header else None, first_row)

    def to_json(self) -> dict[str, Any]:
        return {FORMAT: FORMAT_VERSION, **as_json(asdict(self))}

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read and check an index file."""
        table = read_json(path)
        version = table.get(FORMAT) if isinstance(table, dict) else None
        if version != FORMAT_VERSION:
            raise RunError(f"{path}: expected a cache of format {FORMAT_VERSION}, got {version!r}; extract another.")
        try:
            index = TypeAdapter(cls).validate_python(table)
            where = next(
                (f"shards.{number}" for number, shard in enumerate(index.shards) if not index.has_all(shard)), ""
            )
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
        if where:
            raise RunError(f"{path}: damaged at {where}; remove {path.parent} and extract again.")
        return index

    def has_all(self, shard: Shard) -> bool:
        """Return whether a shard is of a known split and, if it is written, has the sums of every layer."""
        counts = {len(shard.squares), len(shard.squared_errors)}
        return shard.split in self.splits and (shard.sha256 is None or counts == {len(self.layers)})


def stored_order(lengths: Indices) -> Indices:
    """Return the window at each position of the stored order: the longest first, then by window number."""
    return np.argsort(-lengths, kind="stable")


def describe_windows(features: Features) -> Windows:
    """Return a description that identifies windows: everything that the encoder reads of them, and their order."""
    digest = hashlib.sha256(str(features.template.context_type).encode())
    for array in (features.rows, features.context_begin, features.input_ids):
        digest.update(np.ascontiguousarray(array).data)
    return {"windows": len(features), "tokens": int(features.rows[-1]), "sha256": digest.hexdigest()}


def difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the first key (`splits.train.windows`) at which two tables differ, with both values."""
    for key in dict.fromkeys([*second, *first]):
        left, right = first.get(key), second.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            inner = difference(left, right)
            if inner:
                return (f"{key}.{inner[0]}", *inner[1:])
        elif left != right:
            return key, json.dumps(left), json.dumps(right)
    return None


def as_json(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table as it comes back from a JSON file: tuples become lists."""
    copied: dict[str, Any] = json.loads(json.dumps(table))
    return copied


def layers_in_words(layers: Sequence[int]) -> str:
    """Return layers in words: `layers 1 to 6`, `the pooled output and layers 0, 3`."""
    numbers = [layer for layer in layers if layer != POOLED]
    words = ["the pooled output"] if POOLED in layers else []
    if len(numbers) == 1:
        words.append(f"layer {numbers[0]}")
    elif len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        words.append(f"layers {numbers[0]} to {numbers[-1]}")
    elif numbers:
        words.append(f"layers {', '.join(map(str, numbers))}")
    return " and ".join(words)


def _map(path: Path, size: int) -> NDArray[np.uint8]:
    """Map a file into memory. numpy's own map keeps the file open, and open files are limited."""
    data: NDArray[np.uint8] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    data.flags.writeable = False
    return data
