"""Hidden states of some windows, written into a cache."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamella.config import POOLED
from lamella.data.batches import collate
from lamella.encoder.cache import (
    INDEX,
    PROGRESS,
    Index,
    Shard,
    as_json,
    describe_windows,
    difference,
    layers_in_words,
    stored_order,
)
from lamella.encoder.device import autocast
from lamella.encoder.encoder import Encoder
from lamella.encoder.storage import Storage, decode, encode, largest
from lamella.errors import EncoderError, RunError, UsageError
from lamella.files import TEMPORARY, locked, write_bytes, write_json
from lamella.progress import progress

if TYPE_CHECKING:
    from lamella.data.features import Features
    from lamella.data.padding import Indices

SHARD_BYTES = 256 * 2**20  # held in memory while it is made, and the most that a kill can cost
SPARE_SHARE, SPARE_BYTES = 0.05, 64 * 2**20  # what must stay free of a disk


@dataclass(frozen=True)
class CacheReport:
    """What a cache costs, in room and in exactness."""

    bytes: int
    bytes_per_token: float
    errors: dict[int, float]  # by layer: RMS of the rounding errors over RMS of the values
    clamped: int  # values that were beyond the number format
    seconds: float  # of this call; one that goes on where another stopped counts its own


def write_cache(
    folder: Path,
    encoder: Encoder,
    splits: Mapping[str, Features],
    layers: Sequence[int],
    *,
    identity: Mapping[str, Any],
    storage: Storage = "fp16",
    precision: str = "fp32",
    batch_size: int = 32,
    overwrite: bool = False,
    say: Callable[[str], None],
) -> CacheReport:
    """Extract the hidden states of all splits into a folder; shards that are there and intact are kept.

    So it goes on where it was stopped, mends a damaged cache and leaves a finished one alone. A cache of another
    `identity`, of other windows, layers, storage or precision is refused, or removed with `overwrite`. The batch size
    is not compared: who goes on may need a smaller one, and the states depend on it by the last bit only. The encoder
    is left in evaluation mode.
    """
    began = time.perf_counter()
    plan = _make_plan(encoder, splits, layers, identity, storage, precision)
    free = _free_bytes(folder)
    say(
        f"{sum(map(len, splits.values()))} windows, {plan.tokens} tokens, {layers_in_words(plan.layers)}, "
        f"{plan.hidden_size} wide, in {storage}: {_size(plan.bytes)} to write, {_size(free)} are free"
    )
    _check_disk(folder, plan, _find_earlier(folder, plan, overwrite), free)
    with locked(folder):
        earlier = _find_earlier(folder, plan, overwrite)  # again: another process may have written it meanwhile
        if earlier is not None and earlier.options != plan.options:
            _remove(folder, earlier)
            earlier = None
        for rest in folder.glob(f".*{TEMPORARY}"):
            rest.unlink()
        index = plan if earlier is None else _keep_intact(folder, earlier, say)
        if not (index.finished and (folder / INDEX).is_file()):
            write_json(folder / PROGRESS, index.to_json())
            (folder / INDEX).unlink(missing_ok=True)
            index = _extract(folder, index, encoder, splits, batch_size)
            write_json(folder / INDEX, {**index.to_json(), "errors": index.errors})
        (folder / PROGRESS).unlink(missing_ok=True)
    report = CacheReport(
        bytes=index.bytes,
        bytes_per_token=index.bytes / max(1, index.tokens),
        errors=index.errors,
        clamped=sum(shard.clamped for shard in index.shards),
        seconds=time.perf_counter() - began,
    )
    say(_report_line(report, storage))
    return report


def _make_plan(
    encoder: Encoder,
    splits: Mapping[str, Features],
    layers: Sequence[int],
    identity: Mapping[str, Any],
    storage: Storage,
    precision: str,
) -> Index:
    """Everything that can be said of a cache before the encoder runs."""
    wrong = [layer for layer in layers if layer != POOLED and not 0 <= layer <= encoder.depth]
    if wrong or not layers:
        raise UsageError(f"layers: expected some of 0 to {encoder.depth}. Got {list(layers)}.")
    if POOLED in layers and getattr(encoder.model, "pooler", None) is None:
        raise EncoderError(f"{identity.get('encoder', 'the encoder')}: has no pooled output to extract.")
    plan = Index(
        identity=as_json(identity),
        storage=storage,
        precision=precision,
        layers=tuple(sorted(set(layers))),
        hidden_size=encoder.hidden_size,
        splits={name: describe_windows(features) for name, features in splits.items()},
        shards=(),
    )
    shards = [shard for name, features in splits.items() for shard in _cut(plan, name, features.lengths)]
    return replace(plan, shards=tuple(shards))


def _cut(plan: Index, split: str, lengths: Indices) -> Iterator[Shard]:
    """The windows of a split in shards as large as may be, and of one window at least."""
    ends = np.append(0, np.cumsum(plan.rows(lengths[stored_order(lengths)]) * plan.row_bytes))
    begin = number = 0
    while begin < len(lengths):
        end = max(begin + 1, int(np.searchsorted(ends, ends[begin] + SHARD_BYTES, side="right")) - 1)
        yield Shard(f"{split}-{number:05}.states", split, begin, end, int(ends[end] - ends[begin]))
        begin, number = end, number + 1


def _find_earlier(folder: Path, plan: Index, overwrite: bool) -> Index | None:
    """The index of the cache that lies in a folder; None where it is empty. Anything else there is refused."""
    try:
        holds = {path.name for path in folder.iterdir() if not path.name.endswith(TEMPORARY)}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{folder}: expected a folder to write the cache into ({error.strerror}).") from None
    if not holds:
        return None
    if not holds & {INDEX, PROGRESS}:
        raise RunError(f"{folder}: is not empty and holds no cache of Lamella; choose another --out.")
    earlier = Index.read(folder / (INDEX if INDEX in holds else PROGRESS))
    unlike = difference(earlier.options, plan.options)
    if unlike and not overwrite:
        key, found, wanted = unlike
        raise RunError(
            f"{folder}: holds a cache with {key} {found}, and not {wanted}; choose another --out, or pass --overwrite."
        )
    return earlier


def _free_bytes(folder: Path) -> int:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _check_disk(folder: Path, plan: Index, earlier: Index | None, free: int) -> None:
    """Refuse what does not fit. What is there already need not be written, or else makes room."""
    missing = plan.bytes
    if earlier is not None:
        there = sum(path.stat().st_size for shard in earlier.shards if (path := folder / shard.file).is_file())
        if earlier.options == plan.options:
            missing -= there
        else:
            free += there
    needed = missing + int(missing * SPARE_SHARE) + SPARE_BYTES
    if missing > 0 and needed > free:
        raise RunError(
            f"{folder}: the cache needs {_size(needed)} of the disk, a little to spare included, and {_size(free)} are "
            f"free. Choose fewer layers, a smaller storage or another disk."
        )


def _remove(folder: Path, index: Index) -> None:
    """Remove a cache, its index last: what a kill leaves must be known for a cache."""
    for name in (*(shard.file for shard in index.shards), PROGRESS, INDEX):
        (folder / name).unlink(missing_ok=True)


def _keep_intact(folder: Path, earlier: Index, say: Callable[[str], None]) -> Index:
    """The earlier index without the hashes of shards that are not as they were written: these are made again."""
    shards = []
    with progress("checking what is there", len(earlier.shards)) as advance:
        for shard in earlier.shards:
            if shard.sha256 is not None and (fault := shard.fault(folder, verify=True)):
                say(f"{folder / shard.file}: {fault}; it is made again")
                shard = replace(shard, sha256=None)
            shards.append(shard)
            advance()
    done = sum(shard.sha256 is not None for shard in shards)
    say(f"{done} of {len(shards)} shards are there already")
    return replace(earlier, shards=tuple(shards))


def _extract(folder: Path, index: Index, encoder: Encoder, splits: Mapping[str, Features], batch_size: int) -> Index:
    """Make the shards that have no hash yet; each is in the index as soon as its file is there."""
    shards = list(index.shards)
    to_do = [number for number, shard in enumerate(shards) if shard.sha256 is None]
    encoder.eval()
    with progress("extracting", sum(shards[number].end - shards[number].begin for number in to_do)) as advance:
        for number in to_do:
            features = splits[shards[number].split]
            data, shards[number] = _make_shard(index, shards[number], encoder, features, batch_size, advance)
            write_bytes(folder / shards[number].file, data.data)
            write_json(folder / PROGRESS, replace(index, shards=tuple(shards)).to_json())
    return replace(index, shards=tuple(shards))


def _make_shard(
    index: Index,
    shard: Shard,
    encoder: Encoder,
    features: Features,
    batch_size: int,
    advance: Callable[..., None],
) -> tuple[NDArray[np.uint8], Shard]:
    """The bytes of a shard, and what is known of it now."""
    order = stored_order(features.lengths)[shard.begin : shard.end]
    data = np.empty(shard.bytes, np.uint8)
    parts = index.parts(data, features.lengths[order])
    next_row = dict(parts.first_row)
    device = next(encoder.parameters()).device
    squares, squared_errors = dict.fromkeys(index.layers, 0.0), dict.fromkeys(index.layers, 0.0)
    clamped = 0
    for begin in range(0, len(order), batch_size):
        windows = order[begin : begin + batch_size]
        for layer, state in _run(encoder, features, windows, index, device).items():
            values, scales = encode(state, index.storage)
            rows = slice(next_row[layer], next_row[layer] + len(state))
            next_row[layer] = rows.stop
            parts.values[rows] = values.cpu().view(torch.uint8).numpy()
            if scales is not None and parts.scales is not None:
                parts.scales[rows] = scales.cpu().numpy()
            squares[layer] += float(torch.linalg.vector_norm(state)) ** 2
            squared_errors[layer] += float(torch.linalg.vector_norm(state - decode(values, scales))) ** 2
            if float(torch.linalg.vector_norm(state, math.inf)) > largest(index.storage):
                clamped += int((state.abs() > largest(index.storage)).sum())
            if not math.isfinite(squares[layer]):
                raise RunError(
                    f"{shard.split}: the encoder, computing in {index.precision}, gave values that are not finite in "
                    f"{layers_in_words([layer])}; extract in bf16 or fp32."
                )
        advance(len(windows))
    return data, replace(
        shard,
        sha256=hashlib.sha256(data.data).hexdigest(),
        squares=tuple(squares.values()),
        squared_errors=tuple(squared_errors.values()),
        clamped=clamped,
    )


def _run(
    encoder: Encoder, features: Features, windows: Indices, index: Index, device: torch.device
) -> dict[int, torch.Tensor]:
    """The layers of some windows without their pads, [tokens, H]; the pooled output, [windows, H]."""
    batch = collate(features, windows).to(device)
    with torch.inference_mode(), autocast(device, index.precision):
        hidden = encoder(batch, index.layers)
    numbers = [layer for layer in index.layers if layer != POOLED]
    states = {layer: state[batch.mask].float() for layer, state in zip(numbers, hidden.layers, strict=True)}
    if hidden.pooled is not None:
        states[POOLED] = hidden.pooled.float()
    return states


def _report_line(report: CacheReport, storage: Storage) -> str:
    worst = max(report.errors, key=report.errors.__getitem__)
    mean, most = sum(report.errors.values()) / len(report.errors), report.errors[worst]
    line = f"{_size(report.bytes)}, {report.bytes_per_token:.0f} bytes a token, in {report.seconds:.0f} s"
    if most:
        line += (
            f"; the error of {storage} is {100 * mean:.2g} % (RMS), {100 * most:.2g} % in {layers_in_words([worst])}"
        )
    if report.clamped:
        line += f"; {report.clamped} values beyond its range were clamped"
    return line


def _size(count: int) -> str:
    """Bytes as a person reads them."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
