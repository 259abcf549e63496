"""Identify an encoder by its parameters: by their hash, or as the original that a rounded copy was made from.

Some encoders are at hand only as a copy whose weights were rounded to 8 bits. A model that was trained on such a copy
works on the original too. It cannot record the original's hash, but it can record how far the original may be: within
half a rounding step of each weight. `docs/decisions/0055-rounded-base.md` explains the limits.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.errors import UsageError

Parameters = Mapping[str, NDArray[Any]]  # the tensors of an encoder by name, without its pooler

SAMPLED = 16  # values of each tensor
MOST_LEVELS = 256  # of a tensor, or of a row of it, that was rounded to 8 bits
FEWEST_LEVELS = 8  # fewer distinct values say nothing: any two are multiples of something
EXAMINED = 1 << 20  # values of a large tensor that are looked at to find its step
NEARBY = np.linspace(0.95, 1.05, 201)  # factors of a step that is known roughly
HALF = 2.0**-11  # largest relative error of fp16
SMALLEST = 2.0**-25  # largest error of the smallest numbers of fp16
# Limits of the difference, as a multiple of the error that rounding makes on average. Half a step, the most that
# rounding can make, is 1.73 times that.
LIMIT_PER_TENSOR = 2.0
LIMIT_IN_ALL = 1.25


class Difference(NamedTuple):
    """How far an encoder is from a rounded copy, by a sample of both: RMS over the values of a tensor, or over all."""

    relative: float  # to the values of a tensor, the median of the tensors that differ
    in_all: float  # multiple of the expected error
    largest: float  # multiple of the expected error of a tensor
    tensor: str  # the tensor with that

    @property
    def explained(self) -> bool:
        """Whether rounding alone can have made it; never true of NaN."""
        return self.largest <= LIMIT_PER_TENSOR and self.in_all <= LIMIT_IN_ALL


@dataclass(frozen=True)
class Rounding:
    """A sample of a rounded encoder, and the error that rounding made, as config.json stores them.

    The arrays are in fp32, little-endian, in base64. Their rows are the tensors, in the order of their names.
    """

    shapes_sha256: str  # of the names and shapes of all tensors
    errors: str  # [N]: expected RMS difference of the sampled values from those of the original
    samples: str  # [N, SAMPLED]

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError if it is damaged."""
        if len(_decode(self.samples)) != SAMPLED * len(_decode(self.errors)):
            raise ValueError("the samples and errors do not fit each other")

    @classmethod
    def measure(cls, parameters: Parameters, where: str) -> Rounding:
        """Find the rounding steps of an encoder in its values, and sample it."""
        samples, squares, rounded = [], [], 0
        for _, values in sorted(parameters.items()):
            steps = rounding_steps(values)
            places = _places(values)
            sample = values.reshape(-1)[places].astype(np.float64)
            own = np.broadcast_to(steps, values.shape)[np.unravel_index(places, values.shape)]
            samples.append(sample)
            squares.append(np.mean(own**2 / 12 + (HALF * sample) ** 2) + SMALLEST**2)
            rounded += bool(steps.any())
        if not rounded:
            raise UsageError(
                f"{where}: expected an encoder whose weights were rounded to at most {MOST_LEVELS} levels, found none "
                "that are; leave out --rounded-base."
            )
        return cls(_hash_shapes(parameters), _encode(np.sqrt(squares)), _encode(np.stack(samples)))

    @property
    def relative(self) -> float:
        """The expected difference from the original, as `Difference.relative`."""
        return _typical_share(_decode(self.errors), _decode(self.samples).reshape(-1, SAMPLED))

    def compare(self, parameters: Parameters) -> Difference | None:
        """Return how far an encoder is from this one; None if its tensors have other names or shapes."""
        if _hash_shapes(parameters) != self.shapes_sha256:
            return None
        names = sorted(parameters)
        known = _decode(self.samples).reshape(len(names), SAMPLED)
        found = np.stack([parameters[name].reshape(-1)[_places(parameters[name])] for name in names])
        differences = _rms(found.astype(np.float64) - known)
        multiples = differences / _decode(self.errors)
        largest = int(np.argmax(multiples))  # NaN counts as the largest
        return Difference(
            relative=_typical_share(differences, known),
            in_all=float(np.sqrt(np.mean(multiples**2))),
            largest=float(multiples[largest]),
            tensor=names[largest],
        )


def hash_arrays(parameters: Parameters) -> str:
    """Return the sha256 of the names, types, shapes and values of arrays."""
    digest = hashlib.sha256()
    for name, array in sorted(parameters.items()):
        digest.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())  # e.g. embeddings.x float32 [512, 384]
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def rounding_steps(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the step of which all values are multiples, for a tensor [1, …] or for each of its rows [R, 1, …].

    It is 0 where there is none. Embeddings are rounded with one step for the tensor, and the weights of linear layers
    often with one step for each output.
    """
    flat = values.reshape(-1)
    step = _common_step(flat[:: max(1, len(flat) // EXAMINED)])
    if step or values.ndim < 2:
        return np.full((1,) * values.ndim, step)
    rows = values.reshape(len(values), -1)
    steps = np.array([_common_step(row) for row in rows])
    if np.count_nonzero(steps) > len(steps) / 2:  # in the other rows, one value is so large that few levels are left
        steps = np.where(steps > 0, steps, np.abs(rows).max(1) / (MOST_LEVELS // 2 - 1))
    return steps.reshape(-1, *(1,) * (values.ndim - 1))


def _common_step(values: NDArray[Any]) -> float:
    """Return the step of which these values are multiples, up to their own rounding to fp16; 0 if there is none."""
    sizes = np.unique(np.abs(values)).astype(np.float64)
    sizes = sizes[sizes > 0]
    if not FEWEST_LEVELS <= len(sizes) <= MOST_LEVELS:
        return 0.0
    # The smallest distance is the step, up to the rounding of both values to fp16, or a small multiple of it.
    smallest = np.diff(sizes[:SAMPLED], prepend=0).min()
    candidates = (smallest * NEARBY / np.array([[1], [2], [3]])).ravel()  # [K]
    candidates = candidates[sizes[-1] / candidates < MOST_LEVELS]
    if not len(candidates):
        return 0.0
    ratios = sizes / candidates[:, None]  # [K, sizes]
    best = candidates[np.argmin(np.square(ratios - np.round(ratios)).sum(1))]
    multiples = np.round(sizes / best)
    step = float(multiples @ sizes / (multiples @ multiples))
    fits = np.abs(sizes - multiples * step) <= 2 * HALF * sizes + SMALLEST
    return step if fits.all() else 0.0


def _places(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the places of the sampled values in a tensor."""
    return np.linspace(0, values.size - 1, SAMPLED).astype(np.int64)


def _typical_share(differences: NDArray[np.float64], samples: NDArray[np.float64]) -> float:
    """Return the median of differences [N] relative to samples [N, SAMPLED], of those that fp16 does not explain."""
    shares = differences / np.maximum(_rms(samples), SMALLEST)
    shares = shares[shares > 2 * HALF]
    return float(np.median(shares)) if len(shares) else 0.0


def _rms(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    root: NDArray[np.float64] = np.sqrt(np.mean(rows**2, axis=1))
    return root


def _hash_shapes(parameters: Parameters) -> str:
    lines = [f"{name} {list(values.shape)}\n" for name, values in sorted(parameters.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _encode(values: NDArray[Any]) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _decode(text: str) -> NDArray[np.float64]:
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float64)
