"""The windows of every epoch: the same, or newly augmented, in any process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles import tiny_run_config, tiny_tokenizer
from lamella.data.file_formats.formats import read
from lamella.data.windows.features import Features, featurise, join_features
from lamella.data.windows.feed import Feed, Recipe

EXAMPLES = read("demo:train").examples[:30]


def feed(**data: Any) -> Feed:
    config = tiny_run_config(data=data, training={"epochs": 3})
    return Feed(Recipe(tiny_tokenizer("bert"), config), EXAMPLES)


def equal(left: Features, right: Features) -> bool:
    names = [field.name for field in fields(Features) if isinstance(getattr(left, field.name), np.ndarray)]
    assert len(names) == 9
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names) and [
        example.context.text for example in left.examples
    ] == [example.context.text for example in right.examples]


def test_without_augmentation_all_epochs_share_their_windows() -> None:
    plain = feed()
    assert plain(0) is plain(5)


def test_augmentation_differs_between_epochs_and_is_reproducible() -> None:
    feed_a, feed_b = feed(augment="eda", workers=0), feed(augment="eda", workers=0)
    first, second = feed_a(0), feed_a(1)
    assert not equal(first, second)
    assert equal(first, feed_b(0))
    assert equal(second, feed_b(1))
    assert equal(second, feed(augment="eda", workers=0)(1))  # an epoch does not depend on earlier epochs


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_windows_as_this_process(workers: int) -> None:
    local, parallel = feed(augment="eda", workers=0), feed(augment="eda", workers=workers)
    try:
        for epoch in (0, 1, 2):
            assert equal(local(epoch), parallel(epoch))
        assert parallel.next is None  # nothing is prepared after the last epoch
    finally:
        parallel.close()


def test_a_ramp_over_steps_ends_with_the_last_step() -> None:
    config = tiny_run_config(
        data={"augment": {"name": "eda", "schedule": "ramp"}}, training={"max_steps": 100, "batch_size": 8}
    )
    feed = Feed(Recipe(tiny_tokenizer("bert"), config), EXAMPLES)
    plain = len(featurise(EXAMPLES, tiny_tokenizer("bert"), config.windows))
    assert feed.epochs == math.ceil(100 * 8 / plain) > 2


def test_workers_exit_when_their_parent_is_killed() -> None:
    script = """
import os, signal
from doubles import tiny_run_config, tiny_tokenizer
from lamella.data.windows.feed import Feed, Recipe
from lamella.data.file_formats.formats import read

if __name__ == "__main__":
    config = tiny_run_config(data={"augment": "eda", "workers": 1})
    feed = Feed(Recipe(tiny_tokenizer("bert"), config), read("demo:train").examples[:4])
    feed(0)
    print(*feed.pool._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as here:
        path = Path(here) / "script.py"
        path.write_text(script)
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        ended = subprocess.run(
            [sys.executable, str(path)], env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == -signal.SIGKILL
    workers = [int(word) for word in ended.stdout.split()]
    assert workers
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_labels_match_the_answers_after_augmentation() -> None:
    features = feed(augment={"name": "eda", "rate": 0.3}, workers=0)(0)
    for window in range(len(features)):
        example = features.examples[features.example[window]]
        if features.start[window] != features.template.cls:
            begin, end = features.characters(window, int(features.start[window]), int(features.end[window]))
            assert example.answers[0].text in example.context.text[begin:end]


def test_joined_windows_equal_windows_cut_together() -> None:
    tokenizer, windows = tiny_tokenizer("bert"), tiny_run_config().windows
    parts = [featurise(EXAMPLES[begin : begin + 11], tokenizer, windows) for begin in (0, 11, 22)]
    whole = featurise(EXAMPLES, tokenizer, windows)
    joined = join_features(parts)
    assert equal(joined, whole)
    assert len(joined.offsets) == len(whole.offsets)
    assert joined.input_ids.dtype == whole.input_ids.dtype
    assert joined.example.dtype == whole.example.dtype
    for window in range(len(whole)):
        token = int(whole.context_begin[window])
        assert joined.characters(window, token, token) == whole.characters(window, token, token)
