"""The tables of findings and differences: each comparison with its published value, ours, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.study.papers.findings import JudgedFinding, RowDifference
from lamella.study.papers.numbers import interval_text, signed
from lamella.study.papers.published_tables import COST_METRICS, METRICS
from lamella.study.papers.verdicts import CLEAR, NOT_RUN, REVERSED
from lamella.study.report.columns import NOTHING
from lamella.study.report.page_blocks import Table

# The verdicts on rows that no paper has: nobody predicted a sign.
WITHOUT_PREDICTION = {CLEAR: "clearly better", REVERSED: "clearly worse", NOT_RUN: NOT_RUN}


def findings_table(findings: Sequence[JudgedFinding], task: str) -> Table:
    """Return the findings of a table, each with its comparisons."""
    rows = []
    for judged in findings:
        text, differences = judged.finding.text, (*judged.differences, *judged.others)
        if len(judged.differences) > 1:
            rows.append((text, f"all {len(judged.differences)} below", "", "", judged.verdict))
            text = ""
        rows += [
            (text, comparison(difference, task), *compared_values(difference), verdict_text(difference))
            for difference in differences
        ]
    return Table(("finding", "comparison", "published", "ours", "verdict"), tuple(rows), frozenset({0, 1, 4}))


def gains_table(findings: Sequence[JudgedFinding], task: str) -> Table:
    """Return the differences of rows of ours from their baseline."""
    rows = [
        (comparison(difference, task), compared_values(difference)[1], _verdict_without_prediction(difference))
        for judged in findings
        for difference in (*judged.differences, *judged.others)
    ]
    return Table(("comparison", "difference", "verdict"), tuple(rows), frozenset({0, 2}))


def comparison(difference: RowDifference, task: str) -> str:
    """Return the two rows of a comparison and what is compared."""
    metric = "accuracy" if (task, difference.metric) == ("answerability", "exact") else METRICS[difference.metric]
    if difference.metric in COST_METRICS:
        share = f"{100 * difference.margin:g} %"
        margin = f"; alike, within {share}" if difference.alike else f"; at most {share} less"
        return f"`{difference.worse}` / `{difference.better}`, {metric}{margin if difference.margin else ''}"
    margin = f"; as good as, margin {difference.margin:g}" if difference.margin else ""
    return f"`{difference.better}` − `{difference.worse}`, {metric}{margin}"


def compared_values(difference: RowDifference) -> tuple[str, str]:
    """Return the published difference and ours with its interval; of costs, the ratios."""
    if difference.metric in COST_METRICS:
        ratios = (difference.published, difference.untested)
        return tuple(NOTHING if ratio is None else f"× {ratio:.2f}" for ratio in ratios)  # type: ignore[return-value]
    ours = difference.ours
    text = signed(difference.untested) if ours is None else f"{signed(ours.value)} {interval_text(ours, digits=2)}"
    return signed(difference.published), text


def verdict_text(difference: RowDifference) -> str:
    """Return the verdict, with the reason why it decides nothing, if there is one."""
    return f"{difference.verdict}: {difference.reason}" if difference.reason else difference.verdict


def _verdict_without_prediction(difference: RowDifference) -> str:
    return WITHOUT_PREDICTION.get(difference.verdict, "not distinguishable")
