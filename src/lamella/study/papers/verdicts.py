"""The verdicts on a finding."""

from __future__ import annotations

CLEAR, SAME, UNDECIDED, REVERSED, NOT_RUN = (
    "same sign and clear",
    "same sign",
    "not distinguishable",
    "reversed",
    "not run",
)
VERDICTS = (NOT_RUN, REVERSED, UNDECIDED, SAME, CLEAR)  # a finding has the first of its comparisons' verdicts
