"""Readers on one encoder in memory: the answers of `Reader`, readers that come and go, threads; no torch."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from lamella import Reader
from lamella.data.examples import Context, Example
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import pad
from lamella.encoder.sources import DEFAULT_READER, MODEL_WEIGHTS, READERS
from lamella.models import shared_encoder
from lamella.models.names import find_model
from lamella.models.shared_encoder import SharedEncoders, SharedReader
from shared_readers import why_not_shared
from tiny_reader import save_tiny_bert, save_tiny_reader

QUESTION, TEXT = "Who found Titan?", "Titan was found by Christiaan Huygens in 1655. Galileo found four other moons."
Tensors = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("encoder") / "encoder", layers=2)


def open_reader(encoders: SharedEncoders, folder: Path) -> SharedReader:
    return encoders.reader(find_model(str(folder)))


def test_readers_share_the_encoder_the_tokenizer_and_the_head(encoder: Path, tmp_path: Path) -> None:
    encoders = SharedEncoders(threads=1)
    other = shutil.copytree(encoder, tmp_path / "the same under another name")
    folders = [
        save_tiny_reader(tmp_path / str(seed), base, seed=seed) for seed, base in enumerate((encoder, other, encoder))
    ]
    readers = [open_reader(encoders, folder) for folder in folders]
    for shared in ("encoder", "tokenizer", "sessions", "head_sessions"):
        assert len({id(getattr(reader, shared)) for reader in readers}) == 1
    for reader, folder in zip(readers, folders, strict=True):
        assert Reader(reader).ask(QUESTION, TEXT) == Reader.load(folder, backend="onnx", threads=1).ask(QUESTION, TEXT)
    different = save_tiny_reader(tmp_path / "3", save_tiny_bert(tmp_path / "different", seed=1))
    assert open_reader(encoders, different).encoder is not readers[0].encoder


def test_an_encoder_leaves_memory_with_its_last_reader(encoder: Path, tmp_path: Path) -> None:
    encoders = SharedEncoders(threads=1)
    folder = save_tiny_reader(tmp_path / "reader", encoder)
    first, second = (open_reader(encoders, folder) for _ in range(2))
    expected = Reader(first).ask(QUESTION, TEXT)
    del first
    gc.collect()
    assert len(encoders._encoders) == 1
    del second
    gc.collect()
    assert len(encoders._encoders) == 0
    assert Reader(open_reader(encoders, folder)).ask(QUESTION, TEXT) == expected


def test_the_graph_of_a_kind_leaves_memory_with_its_last_reader(encoder: Path, tmp_path: Path) -> None:
    """A reader of lower layers has a graph of its own, with another copy of the encoder."""
    encoders = SharedEncoders(threads=1)
    reader = open_reader(encoders, save_tiny_reader(tmp_path / "reader", encoder))
    kind = next(iter(reader.encoder._sessions))
    lower = reader.encoder.sessions(kind._replace(highest=1))
    assert lower is not reader.sessions
    assert len(reader.encoder._sessions) == 2
    del lower
    gc.collect()
    assert list(reader.encoder._sessions.values()) == [reader.sessions] == [reader.shared_part]


def test_a_reader_that_is_replaced_on_disk_keeps_its_tensors_until_it_is_opened_again(
    encoder: Path, tmp_path: Path
) -> None:
    encoders = SharedEncoders(threads=1)
    folder = save_tiny_reader(tmp_path / "reader", encoder, seed=0)
    before = open_reader(encoders, folder)
    old = Reader(before).ask(QUESTION, TEXT)
    shutil.rmtree(folder)
    save_tiny_reader(folder, encoder, seed=1)
    after = Reader(open_reader(encoders, folder)).ask(QUESTION, TEXT)
    assert Reader(before).ask(QUESTION, TEXT) == old != after
    assert after == Reader.load(folder, backend="onnx", threads=1).ask(QUESTION, TEXT)


def test_threads_open_an_encoder_once_and_get_the_answers_of_their_readers(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    outline = shared_encoder._outline
    monkeypatch.setattr(shared_encoder, "_outline", lambda recipe: [opened.append(recipe), outline(recipe)][1])
    folders = [save_tiny_reader(tmp_path / str(seed), encoder, seed=seed) for seed in range(4)]
    expected = [Reader.load(folder, backend="onnx", threads=1).ask(QUESTION, TEXT) for folder in folders]
    encoders, together = SharedEncoders(threads=2), threading.Barrier(4)

    def ask(number: int) -> list[Any]:
        together.wait()
        reader = Reader(open_reader(encoders, folders[number]))
        return [reader.ask(QUESTION, TEXT) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for answers, right in zip(pool.map(ask, range(4)), expected, strict=True):
            assert answers == [right] * 5
    assert len(opened) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch_of_many_readers(threads: int, encoder: Path, tmp_path: Path) -> None:
    """Few windows share the cores, many have one each: the logits are the same."""
    encoders = SharedEncoders(threads=threads)
    readers = [open_reader(encoders, save_tiny_reader(tmp_path / str(seed), encoder, seed=seed)) for seed in range(6)]

    features = featurise([Example("1", QUESTION, Context(TEXT))], readers[0].tokenizer, readers[0].windows)
    padded = pad(features, np.arange(1))
    outputs = list(encoders.run([row for reader in readers for row in reader.rows(padded)]))
    for reader, output in zip(readers, outputs, strict=True):
        np.testing.assert_array_equal(output, reader.logits(padded)[:, 0, : output.shape[1]])
    assert len({output.tobytes() for output in outputs}) == len(readers)


def test_no_cache_is_needed(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_reader(tmp_path / "reader", encoder)
    expected = Reader.load(folder, backend="onnx", threads=1).ask(QUESTION, TEXT)
    monkeypatch.setenv("LAMELLA_CACHE", "")
    assert Reader(open_reader(SharedEncoders(threads=2), folder)).ask(QUESTION, TEXT) == expected


# --- the default reader


def save_variant(folder: Path, change: Callable[[Tensors], Tensors], rank: int = 26) -> Path:
    """Write the default reader with other tensors."""
    shutil.copytree(READERS / DEFAULT_READER, folder)
    save_file(change(load_file(folder / MODEL_WEIGHTS)), folder / MODEL_WEIGHTS)
    config = json.loads((folder / "config.json").read_bytes())
    config["weights_sha256"] = hashlib.sha256((folder / MODEL_WEIGHTS).read_bytes()).hexdigest()
    config["tuning"] |= {"rank": rank, "alpha": rank}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def of_lower_rank(tensors: Tensors) -> Tensors:
    cut = {name: value[:9] for name, value in tensors.items() if name.endswith("lora.A")}
    cut |= {name: value[:, :9].copy() for name, value in tensors.items() if name.endswith("lora.B")}
    return {**tensors, **cut}


def with_another_head(tensors: Tensors) -> Tensors:
    return {name: value[::-1].copy() if name == "head.task.q" else value for name, value in tensors.items()}


def test_the_default_reader_and_its_variants_give_the_answers_of_reader(tmp_path: Path) -> None:
    folders = [
        READERS / DEFAULT_READER,
        save_variant(tmp_path / "lower", of_lower_rank, rank=9),
        save_variant(tmp_path / "head", with_another_head),
    ]
    encoders = SharedEncoders(threads=1)
    readers = [open_reader(encoders, folder) for folder in folders]
    assert len({id(reader.sessions) for reader in readers}) == 1
    assert readers[0].nbytes < 1.02 * (folders[0] / MODEL_WEIGHTS).stat().st_size, "its file is in half precision"
    questions = [QUESTION, "When was Titan found?", "How heavy is Titan?"]
    answers = []
    for reader, folder in zip(readers, folders, strict=True):
        assert why_not_shared(find_model(str(folder))) is None
        own = Reader.load(folder, backend="onnx", threads=1).ask(questions, TEXT, top_k=3)
        shared = Reader(reader).ask(questions, TEXT, top_k=3)
        for a, b in zip(own, shared, strict=True):
            assert [found["answer"] for found in a] == [found["answer"] for found in b]
            assert [found["score"] for found in b] == pytest.approx([found["score"] for found in a], abs=1e-4)
            assert b.null_score == pytest.approx(a.null_score, abs=1e-4)
        answers.append(str(own))
    assert len(set(answers)) == 3
