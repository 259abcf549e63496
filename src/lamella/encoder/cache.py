"""A folder of hidden states: what a frozen encoder made of some windows, read again in any order.

    index.json           what was extracted, from what and how; the shards with their sizes and hashes
    extracting.json      the same while it is being written: a shard without a hash is still to be made
    train-00000.states   a shard: some windows of a split, without pads, the longest windows first

A shard is an array of rows of H numbers, little-endian, layer after layer (`[L, tokens, H]`); before it the pooled
outputs, if they are kept, one row a window; before all rows the scale of each, if they are int8.

Why layer after layer: a batch takes a run of tokens from each layer it reads. From memory, `[tokens, L, H]`, `[L,
tokens, H]` a window and `[L, tokens, H]` a shard are read in the same time (1,200 windows, 6 layers of 384 in fp16).
From a disk, one layer of the six takes 1.2, 1.1 and 0.5 s, and all of them 3.7, 2.9 and 2.9 s: what the system reads
ahead is here more of the same layer, which some later batch wants. Why the longest windows first: neighbours are of
like length, so that they share a batch of the encoder with hardly a pad.
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

from lamella.config import POOLED
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.storage import SCALE_BYTES, TYPES, Storage, decode
from lamella.errors import RunError, UsageError
from lamella.files import file_sha256, read_json
from lamella.progress import progress

if TYPE_CHECKING:
    from lamella.data.batches import Batch
    from lamella.data.features import Features
    from lamella.data.padding import Indices

FORMAT, FORMAT_VERSION = "lamella_cache", 1
INDEX = "index.json"
PROGRESS = "extracting.json"


def open_cache(folder: Path, *, identity: Mapping[str, Any], verify: bool = False) -> Cache:
    """Open a finished cache that was extracted with this identity.

    The sizes of the shards are always checked; their hashes only with `verify`, as that reads every byte. Extracting
    again checks the hashes too, and mends what it finds.
    """
    if not (folder / INDEX).is_file():
        if (folder / PROGRESS).is_file():
            raise RunError(f"{folder}: its extraction is not finished; run it again to go on.")
        raise UsageError(f"{folder}: expected a cache of hidden states (a folder with {INDEX}). Found none.")
    index = Index.read(folder / INDEX)
    unlike = difference(index.identity, as_json(identity))
    if unlike:
        key, found, wanted = unlike
        raise RunError(f"{folder}: was extracted with {key} {found}, and this run has {wanted}; extract another.")
    with progress("checking the cache", len(index.shards)) as advance:
        for shard in index.shards:
            fault = shard.fault(folder, verify=verify)
            if fault:
                raise RunError(f"{folder / shard.file}: {fault}; run the extraction again to mend it.")
            advance()
    return Cache(folder, index)


class Cache:
    """A finished cache; gives the states of the windows that it was made from."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index

    def require(self, layers: Sequence[int]) -> None:
        """Refuse to go without some of these layers."""
        missing = sorted(set(layers).difference(self.index.layers))
        if missing:
            raise RunError(
                f"{self.folder}: holds {layers_in_words(self.index.layers)}, and not {layers_in_words(missing)}; "
                f"extract all that is read."
            )

    def source(self, features: Features) -> CachedStates:
        """The states of these windows; others than those that were extracted are refused."""
        wanted = describe_windows(features)
        for name, split in self.index.splits.items():
            if split == wanted:
                shards = [shard for shard in self.index.shards if shard.split == name]
                return CachedStates(self.folder, self.index, shards, features.lengths)
        there = ", ".join(f"{name} ({split['windows']} windows)" for name, split in self.index.splits.items())
        raise RunError(
            f"{self.folder}: holds {there}, and not these {len(features)} windows, which are of other data or cut in "
            f"another way; extract them."
        )


class CachedStates:
    """The states of one split, called as the encoder is."""

    def __init__(self, folder: Path, index: Index, shards: Sequence[Shard], lengths: Indices) -> None:
        order = stored_order(lengths)
        self._folder, self._index, self._lengths = folder, index, lengths
        self._place = np.argsort(order)  # where a window stands in the stored order
        self._first_token = np.append(0, np.cumsum(lengths[order]))  # of each place, among those of the split
        self._begins = np.array([shard.begin for shard in shards], np.int64)
        self._shards = [
            index.parts(_map(folder / shard.file, shard.bytes), lengths[order[shard.begin : shard.end]])
            for shard in shards
        ]

    def __call__(self, batch: Batch, layers: Sequence[int]) -> HiddenStates:
        """The hidden states of a batch as fp32 on its device, zero at the pads."""
        Cache(self._folder, self._index).require(layers)
        found = {layer: self._gather(batch, layer) for layer in set(layers)}
        numbers = tuple(layer for layer in layers if layer != POOLED)
        pooled = found[POOLED][:, 0] if POOLED in layers else None
        states = tuple(found[layer] for layer in numbers)
        return HiddenStates(states, batch.mask, batch.is_context, pooled, numbers)

    def _gather(self, batch: Batch, layer: int) -> Tensor:
        """One layer of a batch, [B, T, H]; the pooled output is a layer with one token.

        Bytes are copied as they are stored, by numpy, and converted all at once on the device. Converting while copying
        would touch them once less, but torch would set its threads on each of many small copies: where another program
        is busy too, the threads wait for one another, and all takes several times as long.
        """
        device, storage = batch.input_ids.device, self._index.storage
        count, width = batch.input_ids.shape
        places = self._place[batch.windows]
        numbers = np.searchsorted(self._begins, places, side="right") - 1
        firsts = self._begins[numbers]  # the first place in the shard of each window
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


@dataclass(frozen=True)
class Shard:
    """A file with the windows from place `begin` to `end` of a split; what follows `bytes` is known once it is made."""

    file: Annotated[str, Field(pattern=r"^[^/\\]+$")]  # in the folder and nowhere else: an old one is removed by it
    split: str
    begin: int
    end: int
    bytes: int
    sha256: str | None = None
    squares: tuple[float, ...] = ()  # by layer: the sum of the squared values, and of their squared rounding errors
    squared_errors: tuple[float, ...] = ()
    clamped: int = 0  # values that were beyond the number format

    def fault(self, folder: Path, *, verify: bool) -> str | None:
        """What is wrong with the file."""
        path = folder / self.file
        if not path.is_file():
            return "is missing"
        size = path.stat().st_size
        if size != self.bytes:
            return f"expected {self.bytes} bytes, found {size}"
        if verify and file_sha256(path) != self.sha256:
            return "is not as it was written (its sha256 differs)"
        return None


@dataclass(frozen=True)
class Parts:
    """What lies in a shard, as views of its bytes."""

    values: NDArray[np.uint8]  # [rows, bytes of H numbers]
    scales: NDArray[np.float32] | None  # [rows]
    first_row: dict[int, int]  # of each layer


@dataclass(frozen=True)
class Index:
    """What index.json says, or extracting.json."""

    identity: dict[str, Any]
    storage: Storage
    precision: str  # what the encoder computed in
    layers: tuple[int, ...]  # sorted; POOLED, where it is kept, is the first
    hidden_size: int
    splits: dict[str, dict[str, Any]]
    shards: tuple[Shard, ...]

    @property
    def finished(self) -> bool:
        return all(shard.sha256 is not None for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(int(split["tokens"]) for split in self.splits.values())

    @property
    def errors(self) -> dict[int, float]:
        """By layer: RMS of the rounding errors over RMS of the values."""
        found = {}
        for place, layer in enumerate(self.layers):
            square = sum(shard.squares[place] for shard in self.shards)
            error = sum(shard.squared_errors[place] for shard in self.shards)
            found[layer] = math.sqrt(error / square) if square else 0.0
        return found

    @property
    def options(self) -> dict[str, Any]:
        """What decides which states there are; how they are cut into shards does not."""
        return {key: value for key, value in self.to_json().items() if key != "shards"}

    def rows(self, lengths: Indices) -> Indices:
        """How many rows windows of these lengths have: one a token and layer, one for the pooled output."""
        pooled = POOLED in self.layers
        return lengths * (len(self.layers) - pooled) + pooled

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * TYPES[self.storage].itemsize + (SCALE_BYTES if self.storage == "int8" else 0)

    def parts(self, data: NDArray[np.uint8], lengths: Indices) -> Parts:
        """Where what lies in the bytes of a shard, given the lengths of its windows."""
        first_row, rows = {}, 0
        for layer in self.layers:
            first_row[layer] = rows
            rows += len(lengths) if layer == POOLED else int(lengths.sum())
        ahead = rows * SCALE_BYTES if self.storage == "int8" else 0
        return Parts(data[ahead:].reshape(rows, -1), data[:ahead].view("<f4") if ahead else None, first_row)

    def to_json(self) -> dict[str, Any]:
        return {FORMAT: FORMAT_VERSION, **as_json(asdict(self))}

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read it; one that is damaged or of another version is refused."""
        table = read_json(path)
        version = table.get(FORMAT) if isinstance(table, dict) else None
        if version != FORMAT_VERSION:
            raise RunError(f"{path}: expected a cache of format {FORMAT_VERSION}. Got {version!r}; extract another.")
        try:
            return TypeAdapter(cls).validate_python(table)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise RunError(f"{path}: is damaged at {where}; remove {path.parent} and extract anew.") from None


def stored_order(lengths: Indices) -> Indices:
    """Which window stands at each place: the longest first, of equals the earlier."""
    return np.argsort(-lengths, kind="stable")


def describe_windows(features: Features) -> dict[str, Any]:
    """What tells windows from others: all that the encoder is given of them, and in which order they come."""
    digest = hashlib.sha256(str(features.template.context_type).encode())
    for array in (features.rows, features.context_begin, features.input_ids):
        digest.update(np.ascontiguousarray(array).data)
    return {"windows": len(features), "tokens": int(features.rows[-1]), "sha256": digest.hexdigest()}


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first key (`splits.train.windows`) at which two tables differ, and what each has there."""
    for key in dict.fromkeys([*wanted, *found]):
        one, other = found.get(key), wanted.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            inner = difference(one, other)
            if inner:
                return (f"{key}.{inner[0]}", *inner[1:])
        elif one != other:
            return key, json.dumps(one), json.dumps(other)
    return None


def as_json(table: Mapping[str, Any]) -> dict[str, Any]:
    """What comes back when a table is written as JSON and read again: tuples become lists."""
    again: dict[str, Any] = json.loads(json.dumps(table))
    return again


def layers_in_words(layers: Sequence[int]) -> str:
    """`layers 1 to 6`, `the pooled output and layers 0, 3`."""
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
    """The bytes of a file, read as they are touched. numpy's own map would keep the file open, perhaps one too many."""
    data: NDArray[np.uint8] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    data.flags.writeable = False
    return data
