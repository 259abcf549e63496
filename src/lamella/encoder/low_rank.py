"""The nearest matrix of a low rank, as two factors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ROUNDING = 1e-8  # squared singular values below this share of the largest come from rounding when weights were merged


def nearest_of_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Return A [R, I] and B [O, R] whose product B A is nearest to a matrix [O, I], and its share of the squares.

    R is less than `rank` if the matrix has a lower rank: a pair of zeros would never learn anything. With the matrix
    as U S Vᵀ, its first singular values are split evenly between the factors, so that both learn at the same pace.
    They are computed from the eigenvectors of the matrix times its transpose, along its shorter side: several times as
    fast, and double precision makes up for the precision that squaring loses.
    """
    if matrix.shape[0] > matrix.shape[1]:
        a, b, share = nearest_of_rank(matrix.T, rank)
        return b.T, a.T, share
    double = matrix.double()
    with _one_thread():
        squares, u = torch.linalg.eigh(double @ double.T)  # in ascending order
    squares, u = squares.flip(0), u.flip(1)
    rank = min(rank, int((squares > ROUNDING * squares[0].clamp(min=0)).sum()))
    squares, u = squares[:rank], u[:, :rank]
    root = squares**0.25
    a, b = (u.T @ double) / root[:, None], u * root
    total = float(double.square().sum())
    return a.to(matrix.dtype), b.to(matrix.dtype), float(squares.sum()) / total if total else 1.0


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread inside the block: LAPACK's threads wait long for one another if other processes use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
