"""Extraction: run a frozen encoder over windows and write the hidden states into a cache."""

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

from lamella.atomic import TEMPORARY
from lamella.config import POOLED
from lamella.data.windows.batches import collate
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
from lamella.errors import EncoderError, RunError, UsageError, counted
from lamella.files import locked, write_bytes, write_json
from lamella.progress import Log, progress

if TYPE_CHECKING:
    from lamella.data.windows.features import Features
    from lamella.data.windows.padding import Indices

SHARD_BYTES = 256 * 2**20  # kept in memory until it is written, and the most that an interruption can lose
SPARE_SHARE, SPARE_BYTES = 0.05, 64 * 2**20  # disk space that must stay free


@dataclass(frozen=True)
class CacheReport:
    """The size of a cache and its rounding errors."""

    bytes: int
    bytes_per_token: float
    errors: dict[int, float]  # per layer: RMS of the rounding errors over RMS of the values
    clamped: int  # number of values outside the range of the number format
    seconds: float  # of this call, without earlier ones that were interrupted


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
    log: Log,
) -> CacheReport:
    """Extract the hidden states of all splits into a folder; intact shards that exist already are kept.

    So an interrupted extraction continues, a damaged cache is repaired and a finished one stays as it is. A cache with
    another `identity`, other windows, layers, storage or precision is an error, or is removed with `overwrite`. The
    batch size may differ: continuing may need a smaller one, and it changes the states in the last bit only. The
    encoder is left in evaluation mode.
    """
    began = time.perf_counter()
    plan = _make_plan(encoder, splits, layers, identity, storage, precision)
    free = _free_bytes(folder)
    log(
        f"{counted(sum(map(len, splits.values())), 'window')}, {counted(plan.tokens, 'token')}, "
        f"{layers_in_words(plan.layers)}, width {plan.hidden_size}, in {storage}: {_size(plan.bytes)} to write, "
        f"{_size(free)} free"
    )
    _check_disk(folder, plan, _find_earlier(folder, plan, overwrite), free)
    with locked(folder):
        earlier = _find_earlier(folder, plan, overwrite)  # again: another process may have written meanwhile
        if earlier is not None and earlier.options != plan.options:
            _remove(folder, earlier)
            earlier = None
        if earlier is not None:
            for name, features in splits.items():
                earlier.shards_of(name, features.lengths, folder)
        for leftover in folder.glob(f".*{TEMPORARY}"):
            leftover.unlink()
        index = plan if earlier is None else _keep_intact(folder, earlier, log)
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
    log(_report_line(report, storage))
    return report


def _make_plan(
    encoder: Encoder,
    splits: Mapping[str, Features],
    layers: Sequence[int],
    identity: Mapping[str, Any],
    storage: Storage,
    precision: str,
) -> Index:
    """Return the index of the cache, as far as it is known before the encoder runs."""
    wrong = [layer for layer in layers if layer != POOLED and not 0 <= layer <= encoder.depth]
    if wrong or not layers:
        raise UsageError(f"layers: expected some of 0 to {encoder.depth}, got {list(layers)}.")
    if POOLED in layers and getattr(encoder.model, "pooler", None) is None:
        raise EncoderError(f"{identity.get('encoder', 'the encoder')}: has no pooled output; choose other layers.")
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
    """Divide the windows of a split into shards of up to SHARD_BYTES, with at least one window each."""
    ends = np.append(0, np.cumsum(plan.rows(lengths[stored_order(lengths)]) * plan.row_bytes))
    begin = number = 0
    while begin < len(lengths):
        end = max(begin + 1, int(np.searchsorted(ends, ends[begin] + SHARD_BYTES, side="right")) - 1)
        yield Shard(f"{split}-{number:05}.states", split, begin, end, int(ends[end] - ends[begin]))
        begin, number = end, number + 1


def _find_earlier(folder: Path, plan: Index, overwrite: bool) -> Index | None:
    """Return the index of the cache in a folder; None if it is empty. Other files in the folder are an error."""
    try:
        names = {path.name for path in folder.iterdir() if not path.name.endswith(TEMPORARY)}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{folder}: expected a folder to write the cache into ({error.strerror}).") from None
    if not names:
        return None
    if not names & {INDEX, PROGRESS}:
        raise RunError(f"{folder}: expected an empty folder or a cache, found other files; choose another --out.")
    earlier = Index.read(folder / (INDEX if INDEX in names else PROGRESS))
    mismatch = difference(earlier.options, plan.options)
    if mismatch and not overwrite:
        key, existing, expected = mismatch
        raise RunError(
            f"{folder}: expected a cache with {key} {expected}, found {existing}; choose another --out, or pass "
            "--overwrite."
        )
    return earlier


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _check_disk(folder: Path, plan: Index, earlier: Index | None, free: int) -> None:
    """Check the free disk space. Existing shards need not be written again, or are removed and make room."""
    missing = plan.bytes
    if earlier is not None:
        existing = sum(path.stat().st_size for shard in earlier.shards if (path := folder / shard.file).is_file())
        if earlier.options == plan.options:
            missing -= existing
        else:
            free += existing
    needed = missing + int(missing * SPARE_SHARE) + SPARE_BYTES
    if missing > 0 and needed > free:
        raise RunError(
            f"{folder}: expected {_size(needed)} of free disk space, including a reserve; found {_size(free)}; "
            f"choose fewer layers, a smaller storage or another disk."
        )


def _remove(folder: Path, index: Index) -> None:
    """Remove a cache, the index last: what an interruption leaves must still be recognised as a cache."""
    for name in (*(shard.file for shard in index.shards), PROGRESS, INDEX):
        (folder / name).unlink(missing_ok=True)


def _keep_intact(folder: Path, earlier: Index, log: Log) -> Index:
    """Return the earlier index without the hashes of damaged shards, so that they are extracted again."""
    shards = []
    with progress("checking existing shards", len(earlier.shards)) as advance:
        for shard in earlier.shards:
            if shard.sha256 is not None and (fault := shard.fault(folder, verify=True)):
                log(f"{folder / shard.file}: {fault}; extracting it again")
                shard = replace(shard, sha256=None)
            shards.append(shard)
            advance()
    done = sum(shard.sha256 is not None for shard in shards)
    log(f"{done} of {counted(len(shards), 'shard')} exist already")
    return replace(earlier, shards=tuple(shards))


def _extract(folder: Path, index: Index, encoder: Encoder, splits: Mapping[str, Features], batch_size: int) -> Index:
    """Write the shards that have no hash yet; the index lists each as soon as its file is complete."""
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
    """Compute a shard; return its bytes, and its entry for the index."""
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
                    f"{shard.split}: expected finite values in {layers_in_words([layer])}, found others with precision "
                    f"{index.precision}; extract in bf16 or fp32."
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
    """Run the encoder; return each layer without padding, [tokens, H], and the pooled output, [windows, H]."""
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
    line = f"{_size(report.bytes)}, {report.bytes_per_token:.0f} bytes per token, in {report.seconds:.0f} s"
    if most:
        line += (
            f"; rounding error of {storage}: {100 * mean:.2g} % (RMS), {100 * most:.2g} % in {layers_in_words([worst])}"
        )
    if report.clamped:
        line += f"; {counted(report.clamped, 'value')} outside its range clamped"
    return line


def _size(count: int) -> str:
    """Return a number of bytes in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
