"""Batches of similar length: each window once, at the least cost, with the logits that it has among others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from doubles import examples_about, tiny_run_config, tiny_tokenizer
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import BATCH_COST, Padded, compute_by_length, divide_by_length, pad

TEXT = "Titan is the largest moon of Saturn . "


def cost(lengths: NDArray[np.int64], batches: list[NDArray[np.int64]], batch_cost: int) -> int:
    return sum(batch_cost + int(lengths[rows].max()) * len(rows) for rows in batches)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=7), st.integers(0, 300))
def test_no_other_division_by_length_costs_less(found: list[int], batch_cost: int) -> None:
    lengths = np.array(found)
    batches = divide_by_length(lengths, batch_cost)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    order = np.argsort(-lengths, kind="stable")
    cuts = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(order)), count) for count in range(len(order))
    )
    least = min(cost(lengths, np.split(order, places), batch_cost) for places in cuts)
    assert cost(lengths, batches, batch_cost) == least


def test_windows_of_similar_length_stay_together() -> None:
    lengths = np.array([200, 190, 180, 200])
    assert [rows.tolist() for rows in divide_by_length(lengths)] == [[0, 1, 2, 3]]
    longest, *others = divide_by_length(np.array([20, 384, 30, 20 + BATCH_COST // 4]))
    assert longest.tolist() == [1]
    assert sorted(itertools.chain(*others)) == [0, 2, 3]


@pytest.mark.parametrize("per_token", [True, False])
def test_logits_are_in_the_order_of_the_windows(per_token: bool) -> None:
    windows = tiny_run_config(windows={"max_seq_length": 128, "doc_stride": 32}).windows
    examples = examples_about([TEXT * times for times in (1, 9, 2, 8, 1, 1, 1)])
    features = featurise(examples, tiny_tokenizer("bert"), windows)
    padded = pad(features, np.arange(len(features.lengths)))
    sizes = []

    def compute(batch: Padded) -> NDArray[np.float32]:
        sizes.append(batch.mask.shape)
        assert np.array_equal(batch.mask.sum(1), features.lengths[batch.windows])
        logits: Any = np.stack([batch.input_ids, batch.is_context]).astype(np.float32)
        return logits if per_token else logits.sum(2, keepdims=True)

    actual = compute_by_length(padded, compute)
    assert len(sizes) > 1
    assert sum(rows for rows, _ in sizes) == len(padded.mask)
    expected = np.stack([padded.input_ids, padded.is_context]).astype(np.float32)
    assert np.array_equal(actual, expected if per_token else expected.sum(2, keepdims=True))
