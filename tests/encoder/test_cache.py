"""The cache of hidden states: it equals the output of the encoder, and every fault is reported."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doubles import DEPTH, FAMILIES, HIDDEN, corpus, examples_about, tiny_encoder, tiny_run_config, tiny_tokenizer
from lamella import registry
from lamella.atomic import TEMPORARY
from lamella.config import POOLED
from lamella.data.windows.batches import BucketOrder, collate
from lamella.data.windows.features import Features, featurise
from lamella.encoder import extraction
from lamella.encoder.cache import INDEX, PROGRESS, Cache, open_cache, stored_order
from lamella.encoder.encoder import Encoder, HiddenStates
from lamella.encoder.extraction import CacheReport, write_cache
from lamella.encoder.storage import Storage, decode, encode, largest, round_states
from lamella.errors import EncoderError, LamellaError, RunError, UsageError
from lamella.files import locked
from lamella.heads.head import Head

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = tuple(range(DEPTH + 1))
IDENTITY = {"encoder": "tiny-bert", "sha256": "0" * 64}
STORAGES: tuple[Storage, ...] = get_args(Storage)
ITEM = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
SHARD = 20_000  # bytes: a few windows of the tiny encoder


def windows_of(family: str = "bert", first: int = 0, count: int = 14) -> Features:
    """Windows of different lengths, unsorted; some contexts need several."""
    texts = [text[: 37 * (1 + number * 5 % 11)] for number, text in enumerate(corpus()[first : first + count])]
    return featurise(examples_about(texts), tiny_tokenizer(family), tiny_run_config().windows)


@dataclass
class Given:
    """The inputs of an extraction."""

    folder: Path
    encoder: Encoder = field(default_factory=lambda: tiny_encoder(pooler=True).encoder)
    train: Features = field(default_factory=windows_of)
    dev: Features = field(default_factory=lambda: windows_of(first=14, count=5))
    log: list[str] = field(default_factory=list)

    def write(self, layers: tuple[int, ...] = ALL, **options: Any) -> CacheReport:
        splits = {"train": self.train, "dev": self.dev}
        options = {"identity": IDENTITY, "batch_size": 4, **options}
        return write_cache(self.folder, self.encoder, splits, layers, log=self.log.append, **options)

    def open(self, **options: Any) -> Cache:
        return open_cache(self.folder, **{"identity": IDENTITY, **options})

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.states"))


@pytest.fixture
def given_windows(tmp_path: Path) -> Given:
    return Given(tmp_path / "cache")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "SHARD_BYTES", SHARD)


def compare(live: HiddenStates, cached: HiddenStates, tolerance: float) -> None:
    """Check that the states are equal at the real tokens and zero at the padding."""
    assert len(live.layers) == len(cached.layers)
    for expected, actual in zip(live.layers, cached.layers, strict=True):
        assert actual.dtype == torch.float32
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual[live.mask], expected[live.mask], rtol=0, atol=tolerance)
        assert not actual[~live.mask].any()
    assert torch.equal(live.mask, cached.mask)
    assert torch.equal(live.is_context, cached.is_context)
    assert (live.pooled is None) == (cached.pooled is None)
    if live.pooled is not None and cached.pooled is not None:
        torch.testing.assert_close(cached.pooled, live.pooled, rtol=0, atol=tolerance)


@torch.no_grad()
def compare_all(given: Given, layers: tuple[int, ...] = ALL, tolerance: float = 2e-6) -> None:
    """Compare every window of both splits, in the batches of a training epoch."""
    cache = given.open()
    for features in (given.train, given.dev):
        source = cache.source(features)
        for (indices,) in (group.batches for group in BucketOrder(features.lengths, 5, seed=3).epoch(0)):
            batch = collate(features, indices)
            compare(given.encoder(batch, layers), source(batch, layers), tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp32_cache_equals_the_encoder(family: str, tmp_path: Path) -> None:
    encoder = tiny_encoder(family).encoder
    given = Given(tmp_path, encoder, windows_of(family), windows_of(family, first=14, count=5))
    given.write(storage="fp32")
    compare_all(given)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_cached_states_are_the_rounded_live_states(given_windows: Given, storage: Storage) -> None:
    layers = (POOLED, *ALL)
    given_windows.write(layers, storage=storage)
    cache = given_windows.open(verify=True)
    assert len(given_windows.shards()) > 4
    for split, features in {"train": given_windows.train, "dev": given_windows.dev}.items():
        source, order = cache.source(features), stored_order(features.lengths)
        for shard in (shard for shard in cache.index.shards if shard.split == split):
            for begin in range(shard.begin, shard.end, 4):  # the same batches as in the extraction: exactly equal
                batch = collate(features, order[begin : min(begin + 4, shard.end)])
                live = given_windows.encoder(batch, layers)
                compare(round_states(live, storage), source(batch, layers), tolerance=0)


@pytest.mark.usefixtures("small_shards")
def test_layers_come_in_the_requested_order(given_windows: Given) -> None:
    given_windows.write((POOLED, 3, 1, 0), storage="fp32")
    assert given_windows.open().index.layers == (POOLED, 0, 1, 3)
    for layers in [(3, 0), (1, 1, 3), (POOLED, 1), (0, POOLED, 3), (POOLED,), (3,)]:
        compare_all(given_windows, layers)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_shard_has_the_documented_layout(given_windows: Given, storage: Storage) -> None:
    given_windows.write((POOLED, 1, DEPTH), storage=storage)
    features, order = given_windows.train, stored_order(given_windows.train.lengths)
    assert features.lengths[order].tolist() == sorted(features.lengths, reverse=True)
    data = (given_windows.folder / "train-00000.states").read_bytes()
    windows, tokens = len(features), len(features.input_ids)
    rows = windows + 2 * tokens
    assert len(data) == rows * (HIDDEN * ITEM[storage] + (4 if storage == "int8" else 0))
    scales = None
    if storage == "int8":
        scales, data = torch.frombuffer(bytearray(data[: 4 * rows]), dtype=torch.float32), data[4 * rows :]
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}[storage]
    states = decode(torch.frombuffer(bytearray(data), dtype=kind).view(rows, HIDDEN), scales)
    hidden = given_windows.open().source(features)(collate(features, order), (POOLED, 1, DEPTH))
    assert hidden.pooled is not None
    expected = [hidden.pooled, *(layer[hidden.mask] for layer in hidden.layers)]
    assert torch.equal(states, torch.cat(expected))


def test_a_cache_has_no_padding_and_only_the_chosen_layers(given_windows: Given) -> None:
    tokens = len(given_windows.train.input_ids) + len(given_windows.dev.input_ids)
    windows = len(given_windows.train) + len(given_windows.dev)
    for storage in STORAGES:
        for layers in [(DEPTH,), (1, 2), (POOLED, *ALL)]:
            report = given_windows.write(layers, storage=storage, overwrite=True)
            rows = tokens * len([layer for layer in layers if layer != POOLED]) + windows * (POOLED in layers)
            row = HIDDEN * ITEM[storage] + (4 if storage == "int8" else 0)
            assert report.bytes == rows * row == sum(path.stat().st_size for path in given_windows.shards())
            assert report.bytes_per_token == report.bytes / tokens


def test_no_shard_is_larger_than_the_limit_unless_one_window_is(
    given_windows: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    widest = int(given_windows.train.lengths.max()) * len(ALL) * HIDDEN * 2
    for limit in (1, widest - 1, widest, 3 * widest, 10**9):
        monkeypatch.setattr(extraction, "SHARD_BYTES", limit)
        shutil.rmtree(given_windows.folder, ignore_errors=True)
        given_windows.write()
        shards = given_windows.open().index.shards
        assert all(shard.bytes <= limit or shard.end - shard.begin == 1 for shard in shards)
        for split, features in {"train": given_windows.train, "dev": given_windows.dev}.items():
            own = [shard for shard in shards if shard.split == split]
            assert [shard.begin for shard in own] == [0, *(shard.end for shard in own[:-1])]
            assert own[-1].end == len(features)
        assert len(shards) == {1: len(given_windows.train) + len(given_windows.dev), 10**9: 2}.get(limit, len(shards))


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_the_reported_error_is_the_error_of_the_stored_values(given_windows: Given, storage: Storage) -> None:
    report = given_windows.write(storage=storage)
    values, errors = np.zeros(len(ALL)), np.zeros(len(ALL))
    for features in (given_windows.train, given_windows.dev):
        batch = collate(features, np.arange(len(features)))
        live = given_windows.encoder(batch, ALL)
        for layer, (exact, rounded) in enumerate(zip(live.layers, round_states(live, storage).layers, strict=True)):
            values[layer] += exact[live.mask].double().square().sum()
            errors[layer] += (exact - rounded)[live.mask].double().square().sum()
    assert list(report.errors) == list(ALL)
    assert list(report.errors.values()) == pytest.approx(list(np.sqrt(errors / values)), rel=1e-2, abs=1e-12)
    assert report.clamped == 0
    index = json.loads((given_windows.folder / INDEX).read_text())
    assert index["errors"] == {str(layer): error for layer, error in report.errors.items()}
    worst = max(report.errors.values())
    assert {"fp32": 0, "fp16": 3e-4, "bf16": 3e-3, "int8": 1e-2}[storage] >= worst
    assert (f"{100 * worst:.2g} % in layer" in given_windows.log[-1]) == (storage != "fp32")


@given(
    arrays.arrays(np.float32, (3, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from(STORAGES),
)
def test_rounding_is_as_exact_as_the_format_allows(values: np.ndarray[Any, Any], storage: Storage) -> None:
    before = torch.from_numpy(values)
    stored, scales = encode(before, storage)
    after = decode(stored, scales)
    assert stored.element_size() == ITEM[storage]
    assert after.isfinite().all()
    assert torch.equal(decode(*encode(after, storage)), after) or storage == "int8"
    inside = before.abs() <= largest(storage)
    assert (after[~inside] == before[~inside].sign() * largest(storage)).all() or storage == "int8"
    error = (after.double() - before.double()).abs()[inside]
    if storage == "int8":  # half a level of the token's largest value; values around 1e-36 may become 0
        row = before.abs().clamp(max=largest("int8")).amax(-1, keepdim=True).double().expand(before.shape)[inside]
        assert (error <= row / 127 * 0.50001 + 1.5e-36).all()
    else:  # half of the last digit, which has a lower limit near zero
        digits, last = {"fp32": (24, 0.0), "fp16": (11, 2.0**-24), "bf16": (8, 2.0**-133)}[storage]
        assert (error <= (before[inside].abs().double() * 2.0**-digits).clamp(min=last / 2)).all()


@pytest.mark.parametrize("storage", STORAGES)
def test_zeros_stay_zeros(storage: Storage) -> None:
    assert not decode(*encode(torch.zeros(2, 4), storage)).any()
    tiny = torch.tensor([[0.0, 1e-45, -1e-40, 0.0]])
    assert decode(*encode(tiny, storage)).abs().max() <= 1e-39


def test_int8_uses_all_its_levels_in_every_token() -> None:
    states = torch.randn(2, 7, 16) * torch.logspace(-6, 6, 14).view(2, 7, 1)
    values, scales = encode(states, "int8")
    assert scales is not None
    assert scales.shape == (2, 7)
    assert (values.abs().amax(-1) == 127).all()
    torch.testing.assert_close(scales, states.abs().amax(-1) / 127)


def test_values_outside_the_range_are_clamped_and_counted(given_windows: Given) -> None:
    with torch.no_grad():
        given_windows.encoder.model.embeddings.LayerNorm.weight.fill_(1e5)
    report = given_windows.write((0,), storage="fp16")
    assert report.clamped > 0
    assert f"{report.clamped:,} values outside its range clamped" in given_windows.log[-1]
    features = given_windows.train
    states = given_windows.open().source(features)(collate(features, np.arange(4)), (0,)).layers[0]
    assert states.abs().max() == 65504
    assert given_windows.write((0,), storage="bf16", overwrite=True).clamped == 0


def test_states_that_are_not_finite_are_refused(given_windows: Given) -> None:
    with torch.no_grad():
        given_windows.encoder.model.encoder.layer[1].output.LayerNorm.weight[3] = math.nan
    with pytest.raises(RunError, match=r"^train: expected finite values in layer 2, .* precision fp32; extract in"):
        given_windows.write()
    assert not (given_windows.folder / INDEX).exists()


def test_the_encoder_computes_in_the_chosen_precision(given_windows: Given) -> None:
    given_windows.write((DEPTH,), storage="fp32", precision="bf16")
    assert given_windows.open().index.precision == "bf16"
    features = given_windows.dev
    batch = collate(features, stored_order(features.lengths)[:4])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        live = given_windows.encoder(batch, (DEPTH,))
    compare(round_states(live, "fp32"), given_windows.open().source(features)(batch, (DEPTH,)), tolerance=0)


def test_an_encoder_in_training_mode_is_extracted_without_dropout(given_windows: Given) -> None:
    given_windows.encoder.requires_grad_(True).train()
    given_windows.write(storage="fp32")
    compare_all(given_windows)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("mixer", ["scalar_mix", "dot"])
def test_training_from_the_cache_gives_the_same_losses_as_live_training(
    given_windows: Given, storage: Storage, mixer: str
) -> None:
    encoder, features = given_windows.encoder.requires_grad_(False), given_windows.train
    given_windows.write(storage=storage)
    source = given_windows.open().source(features)

    def losses(cached: bool) -> Iterator[float]:
        torch.manual_seed(0)
        head = Head(DEPTH, HIDDEN, mixer=[{"name": mixer}], task={"name": "span"})
        loss = registry.build("loss", "cross_entropy")
        optimiser = torch.optim.AdamW(head.parameters(), lr=0.02)
        for (indices,) in (group.batches for group in BucketOrder(features.lengths, 2, seed=1).epoch(0)):
            batch = collate(features, indices)
            hidden = source(batch, head.layers) if cached else round_states(encoder(batch, head.layers), storage)
            value = loss(head.task.choices(head(hidden), batch), batch)["loss"]
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            yield value.item()

    live, cached = list(losses(cached=False)), list(losses(cached=True))
    assert len(live) >= 7
    assert max(live) > 1.5 * min(live)  # the loss falls, so that an error would show
    assert cached == pytest.approx(live, rel=1e-4)


def test_the_estimate_comes_first_and_is_right(given_windows: Given) -> None:
    report = given_windows.write((1, 2, 3), storage="int8")
    tokens = len(given_windows.train.input_ids) + len(given_windows.dev.input_ids)
    windows = len(given_windows.train) + len(given_windows.dev)
    begin = f"{windows} windows, {tokens:,} tokens, layers 1 to 3, width {HIDDEN}, in int8: "
    assert given_windows.log[0].startswith(f"{begin}{report.bytes / 1e6:.2f} MB to write, ")
    assert len(given_windows.log) == 2


def full_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - free, free))  # type: ignore[attr-defined]


def test_a_full_disk_is_refused_before_anything_is_written(
    given_windows: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, 60_000_000)
    with pytest.raises(
        RunError, match=r"cache: expected 6\d\.\d\d MB of free disk space, .*; found 60\.00 MB; choose "
    ):
        given_windows.write()
    assert not given_windows.folder.exists()
    assert len(given_windows.log) == 1  # the estimate
    full_disk(monkeypatch, 80_000_000)
    given_windows.write()
    full_disk(monkeypatch, 0)
    given_windows.write()  # everything exists already
    with pytest.raises(RunError, match="of free disk space"):
        given_windows.write(storage="fp32", overwrite=True)
    compare_all(given_windows, tolerance=1e-2)


@pytest.mark.usefixtures("small_shards")
def test_a_finished_cache_is_not_written_again(given_windows: Given) -> None:
    first = given_windows.write()
    before = {path: path.stat().st_mtime_ns for path in given_windows.folder.iterdir()}
    again = given_windows.write(batch_size=7)
    assert {path: path.stat().st_mtime_ns for path in given_windows.folder.iterdir()} == before
    assert replace(again, seconds=0) == replace(first, seconds=0)
    count = len(given_windows.shards())
    assert given_windows.log[-2] == f"{count} of {count} shards exist already"


def test_another_cache_is_refused_or_overwritten(given_windows: Given) -> None:
    given_windows.write((1, 2))
    other = {
        'storage "int8", found "fp16"': {"storage": "int8"},
        'precision "bf16", found "fp32"': {"precision": "bf16"},
        r"layers \[2\], found \[1, 2\]": {"layers": (2,)},
        'identity.sha256 "1", found "0+"': {"identity": {**IDENTITY, "sha256": "1"}},
        "identity.tuning 3, found null": {"identity": {**IDENTITY, "tuning": 3}},
    }
    for message, options in other.items():
        options = {"layers": (1, 2), **options}
        with pytest.raises(
            RunError, match=f"expected a cache with {message}; choose another --out, or pass --overwrite"
        ):
            given_windows.write(**options)
    given_windows.train = windows_of(count=3)
    with pytest.raises(RunError, match=r"expected a cache with splits.train.windows 5, found 24;"):
        given_windows.write((1, 2))
    (given_windows.folder / "notes.txt").write_text("mine")
    given_windows.write((3,), storage="fp32", overwrite=True)
    compare_all(given_windows, (3,))
    assert (given_windows.folder / "notes.txt").read_text() == "mine"


def test_a_folder_with_other_files_is_never_written_to(given_windows: Given) -> None:
    given_windows.folder.mkdir()
    mine = given_windows.folder / "thesis.tex"
    mine.write_text("")
    with pytest.raises(RunError, match="expected an empty folder or a cache, found other files; choose another --out"):
        given_windows.write(overwrite=True)
    given_windows.folder = mine
    with pytest.raises(RunError, match=r"thesis\.tex: expected a folder"):
        given_windows.write()


def test_two_processes_do_not_write_at_the_same_time(given_windows: Given) -> None:
    with locked(given_windows.folder), pytest.raises(RunError, match="another process is writing here"):
        given_windows.write()


def test_layers_that_the_encoder_does_not_have_are_refused(given_windows: Given) -> None:
    for layers in [(DEPTH + 1,), (-2,), ()]:
        with pytest.raises(UsageError, match=rf"^layers: expected some of 0 to {DEPTH}, got \["):
            given_windows.write(layers)
    given_windows.encoder = tiny_encoder("electra").encoder
    with pytest.raises(EncoderError, match=r"^tiny-bert: has no pooled output"):
        given_windows.write((POOLED, 1))
    assert not given_windows.folder.exists()


def test_a_request_that_does_not_fit_the_cache_is_one_line(given_windows: Given) -> None:
    given_windows.write((1, 2))
    folder, features = given_windows.folder, given_windows.train

    def refused(message: str, action: Any) -> None:
        with pytest.raises(LamellaError, match=message) as caught:
            action()
        assert str(caught.value).startswith(str(folder))
        assert "\n" not in str(caught.value)

    cache = given_windows.open()
    source = cache.source(features)
    batch = collate(features, np.arange(2))
    refused(r"expected layer 3, found layers 1, 2; extract all layers", lambda: source(batch, (1, 3)))
    refused(r"expected the pooled output and layer 0, found", lambda: source(batch, (POOLED, 0, 2)))
    wrong = r"expected a cache with sha256 \"1\", found \"0+\"; extract another"
    refused(wrong, lambda: given_windows.open(identity={**IDENTITY, "sha256": "1"}))
    others = r"expected the 2 windows of this run, found train \(\d+ windows\), dev \(\d+ windows\)"
    refused(others, lambda: cache.source(windows_of(count=2)))
    for changed in (
        replace(features, input_ids=features.input_ids + 1),
        replace(features, context_begin=features.context_begin + 1),
        replace(features, template=replace(features.template, context_type=0)),
    ):
        refused("windows of this run, found", lambda changed=changed: cache.source(changed))
    cache.source(replace(features, start=features.start + 1))  # the encoder does not read labels

    shard = given_windows.shards()[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    refused(rf"states: expected {len(whole)} bytes, found {len(whole) - 1}; run `lamella extract`", given_windows.open)
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    given_windows.open()  # a single bit is found only with verify
    refused(r"has changed since it was written \(the sha256 differs\)", lambda: given_windows.open(verify=True))
    shard.unlink()
    refused("is missing; run `lamella extract` again to repair it", given_windows.open)


def test_a_damaged_or_missing_index_is_reported(given_windows: Given) -> None:
    with pytest.raises(UsageError, match=r"expected a cache of hidden states \(a folder with index.json\), found none"):
        given_windows.open()
    given_windows.write()
    path = given_windows.folder / INDEX
    table = json.loads(path.read_text())
    damaged: dict[str, tuple[Any, str]] = {
        "shards": ([{"file": "../../elsewhere", "split": "train", "begin": 0, "end": 1, "bytes": 1}], "shards.0.file"),
        "storage": ("fp8", "storage"),
        "layers": ("none", "layers"),
    }
    for key, (value, where) in damaged.items():
        path.write_text(json.dumps({**table, key: value}))
        for action in (given_windows.open, lambda: given_windows.write(overwrite=True)):
            with pytest.raises(RunError, match=rf"index\.json: damaged at {where}; remove .* and extract again"):
                action()
    path.write_text(json.dumps({**table, "lamella_cache": 2}))
    with pytest.raises(RunError, match=r"expected a cache of format 1, got 2; extract another"):
        given_windows.open()
    path.rename(given_windows.folder / PROGRESS)
    with pytest.raises(RunError, match="the extraction is not finished; run `lamella extract` again to continue"):
        given_windows.open()


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("file", "a\0b", "shards.0.file"),
        ("bytes", 0, "shards"),
        ("end", 1, "shards"),
        ("split", "other", "shards.0"),
        ("squares", [], "shards.0"),
        ("squared_errors", [-1.0], "shards.0.squared_errors.0"),
    ],
)
def test_shards_that_do_not_fit_their_windows_are_not_continued(
    given_windows: Given, key: str, value: Any, where: str
) -> None:
    given_windows.write()
    path = given_windows.folder / INDEX
    table = json.loads(path.read_text())
    table["shards"][0][key] = value
    path.write_text(json.dumps(table))
    with pytest.raises(RunError, match=rf"index\.json: damaged at {where}; remove .* and extract again"):
        given_windows.write()


@pytest.mark.usefixtures("small_shards")
def test_extracting_again_repairs_damaged_shards_and_nothing_else(
    given_windows: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_windows.write()
    good = {path.name: path.read_bytes() for path in given_windows.folder.iterdir()}
    shards = given_windows.shards()
    shards[1].write_bytes(good[shards[1].name][:-3])
    shards[2].write_bytes(bytes(len(good[shards[2].name])))
    shards[3].unlink()
    before = {path: path.stat().st_mtime_ns for path in (shards[0], *shards[4:])}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    given_windows.log.clear()
    with monkeypatch.context() as patch:
        patch.setattr(extraction, "collate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            given_windows.write()
    assert [line.endswith("; extracting it again") for line in given_windows.log] == [False, True, True, True, False]
    assert given_windows.log[-1] == f"{len(shards) - 3} of {len(shards)} shards exist already"
    with pytest.raises(RunError, match="the extraction is not finished"):
        given_windows.open()
    given_windows.write()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {path.name: path.read_bytes() for path in given_windows.folder.iterdir()} == good


# Each child process extracts into its own folder and kills itself at one point; the parent only counts them.
KILLED = """
import os, signal, sys
import torch
from pathlib import Path
import numpy, lamella.runs as runs
from lamella.encoder import extraction
import test_cache_under_kill as cases

torch.set_num_threads(1)
extraction.SHARD_BYTES = cases.SHARD

def die(): os.kill(os.getpid(), signal.SIGKILL)

def at_call(owner, name, number, condition=lambda *arguments: True, after=False):
    original, seen = getattr(owner, name), []
    def counted(*arguments, **options):
        seen.append(condition(*arguments))
        if sum(seen) == number and seen[-1]:
            if after: original(*arguments, **options)
            die()
        return original(*arguments, **options)
    setattr(owner, name, counted)

points = {
    "at_first": lambda: at_call(extraction, "write_json", 1),
    "encoding": lambda: at_call(extraction, "collate", 7),
    "writing_a_shard": lambda: at_call(os, "fsync", 1 + 2 * 2 + 1),
    "before_it_is_listed": lambda: at_call(extraction, "write_bytes", 3, after=True),
    "before_the_index": lambda: at_call(extraction, "write_json", 1, lambda path, _: path.name == "index.json"),
    "after_the_index": lambda: at_call(extraction, "write_json", 1, lambda path, _: path.name == "index.json", True),
}
given = cases.Given(Path())
for name, arm in points.items():
    child = os.fork()
    if child == 0:
        arm()
        given.folder = Path(sys.argv[1]) / name
        given.write()
        os._exit(1)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.usefixtures("small_shards", "one_thread")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_extraction_killed_anywhere_continues_to_the_same_cache(tmp_path: Path, given_windows: Given) -> None:
    given_windows.write()
    whole = {path.name: path.read_bytes() for path in given_windows.folder.iterdir()}
    assert len(whole) >= 8
    script = tmp_path / "script"
    script.mkdir()
    shutil.copy(__file__, script / "test_cache_under_kill.py")
    paths = [str(script), str(Path(__file__).parents[1]), *sys.path]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    killed = dict(line.split() for line in ended.stdout.splitlines())
    assert list(killed.values()) == ["-9"] * 6, ended.stderr

    finished = {}
    for name in killed:
        given = replace(given_windows, folder=tmp_path / name, log=[])
        remaining = list(given.folder.iterdir())
        assert (name == "after_the_index") == (given.folder / INDEX).exists()
        assert (name == "writing_a_shard") == any(path.name.endswith(TEMPORARY) for path in remaining)
        record = given.folder / (INDEX if name == "after_the_index" else PROGRESS)
        shards = json.loads(record.read_text())["shards"] if record.exists() else []
        listed = [given.folder / shard["file"] for shard in shards if shard["sha256"]]
        before = {path: path.stat().st_mtime_ns for path in listed}
        given.write()
        assert {path: path.stat().st_mtime_ns for path in listed} == before
        assert {path.name: path.read_bytes() for path in given.folder.iterdir()} == whole
        finished[name] = len(listed)
    every = len(whole) - 1
    assert finished == {
        "at_first": 0,
        "encoding": finished["encoding"],
        "writing_a_shard": 2,
        "before_it_is_listed": 2,
        "before_the_index": every,
        "after_the_index": every,
    }
    assert 0 < finished["encoding"] < every


def test_the_hashes_match_the_files(given_windows: Given) -> None:
    given_windows.write()
    for shard in json.loads((given_windows.folder / INDEX).read_text())["shards"]:
        data = (given_windows.folder / shard["file"]).read_bytes()
        assert (shard["bytes"], shard["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_split_may_have_no_windows(given_windows: Given) -> None:
    given_windows.dev = featurise([], tiny_tokenizer("bert"), tiny_run_config().windows)
    given_windows.write(storage="fp32")
    compare_all(given_windows)
    given_windows.train = given_windows.dev
    given_windows.write(overwrite=True)
    assert given_windows.shards() == []


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
@pytest.mark.parametrize("storage", STORAGES)
def test_states_are_on_the_device_of_the_batch(given_windows: Given, storage: Storage, device: str) -> None:
    given_windows.encoder.to(device)
    given_windows.write((POOLED, *ALL), storage=storage)
    source = given_windows.open().source(given_windows.train)
    batch = collate(given_windows.train, np.arange(5))
    on_cpu, moved = source(batch, (POOLED, *ALL)), source(batch.to(torch.device(device)), (POOLED, *ALL))
    assert on_cpu.pooled is not None
    assert moved.pooled is not None
    for expected, actual in zip((on_cpu.pooled, *on_cpu.layers), (moved.pooled, *moved.layers), strict=True):
        assert actual.device.type == device
        assert torch.equal(expected, actual.cpu())
