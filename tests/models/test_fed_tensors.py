"""The tensors that readers feed: kept in half precision without a change of value, and lent in fp32; no torch."""

from __future__ import annotations

import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lamella.models.fed_tensors import FedTensors, WideTensors

pytest.importorskip("onnxruntime")

Tensors = dict[str, NDArray[np.float32]]


def half_tensors(seed: int, rank: int = 3) -> Tensors:
    """Return tensors whose values are all numbers of fp16; LoRA of rank 0 is empty."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"lora.A": (5, rank), "lora.B": (rank, 7), "bias": (7,)}
    return {name: random.normal(size=shape).astype(np.float16).astype(np.float32) for name, shape in shapes.items()}


def lent(wide: WideTensors, tensors: FedTensors) -> Tensors:
    with wide.lend(tensors) as feeds:
        return {name: np.array(value.numpy()) for name, value in feeds.items()}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], tensor, strict=True)


@pytest.mark.parametrize("rank", [3, 0])
def test_values_of_half_precision_take_half_the_memory_and_stay_equal(rank: int) -> None:
    given = half_tensors(0, rank)
    tensors = FedTensors(given)
    assert tensors.half.dtype == np.float16
    assert not tensors.full
    assert_same(lent(WideTensors(), tensors), given)


@pytest.mark.parametrize("value", [1 / 3, 1e6, 1e-9, np.inf, np.nan])
def test_a_tensor_that_would_change_stays_in_fp32(value: float) -> None:
    """A third is between two numbers of fp16, a million beyond them, 1e-9 below; only infinity is one of them."""
    given = half_tensors(0)
    given["bias"][2] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = FedTensors(given)
    assert list(tensors.full) == ([] if np.isinf(value) else ["bias"])
    assert_same(lent(WideTensors(), tensors), given)


def test_memory_is_used_again_by_readers_of_other_ranks() -> None:
    wide = WideTensors()
    for seed, rank in enumerate((2, 6, 6, 0, 2)):
        given = half_tensors(seed, rank)
        assert_same(lent(wide, FedTensors(given)), given)
        gc.collect()  # the next reader may get the address of this one
    assert len(wide._blocks) == 1


def test_readers_at_the_same_time_have_their_own_values() -> None:
    wide, given = WideTensors(), [half_tensors(seed, rank=seed) for seed in range(4)]
    readers = [FedTensors(each) for each in given]
    together = threading.Barrier(8)

    def run(number: int) -> Any:
        found = []
        for _ in range(20):
            together.wait()
            with wide.lend(readers[number % 4]) as feeds:
                together.wait()  # all are lent now
                found.append({name: np.array(value.numpy()) for name, value in feeds.items()})
        return found

    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(run, range(8))):
            for each in found:
                assert_same(each, given[number % 4])
    assert 4 <= len(wide._blocks) <= 8
