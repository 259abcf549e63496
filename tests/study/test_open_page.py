"""The page about open questions shows what `results/open` has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "results" / "open.md").read_text("utf-8")
POOLS = {
    "cs224n": "CS224n dev",
    "cs224n-among-train": "CS224n dev among all train files of SQuAD",
    "hotpot": "HotpotQA dev",
    "korquad": "KorQuAD 1.0, the dev articles",
    "korquad-among-train": "KorQuAD 1.0, the dev articles among all others and TyDi QA's",
}


@pytest.mark.parametrize("name", POOLS)
def test_both_tables_show_the_scores_of_the_file(name: str) -> None:
    scores = json.loads((ROOT / "results" / "open" / f"{name}.json").read_text("utf-8"))
    counts = [f"{scores[key]:,}" for key in ("contexts", "passages", "HasAns_total")]
    recall = [f"{scores[f'recall_at_{k}']:.1f}" for k in (1, 5, 10, 20, 50)]
    answered = [f"{scores[key]:.1f}" for key in ("exact", "f1", "HasAns_f1")]
    unanswerable = f"{scores['NoAns_f1']:.1f}" if "NoAns_f1" in scores else ""
    given = f"{scores['given_exact']:.1f}, {scores['given_f1']:.1f}"

    search, reader = _rows(POOLS[name])

    assert [cell.strip("*") for cell in search] == [*counts, *recall]
    assert reader[:-1] == [f"{scores['total']:,}", *answered, unanswerable]
    assert reader[-1].removesuffix(" (its 10 contexts)") == given


def _rows(pool: str) -> list[list[str]]:
    """Return the cells of the rows about a pool, without its name."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    return [row[1:] for row in rows if row[0] == pool]
