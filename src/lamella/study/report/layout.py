"""The layout of a Markdown report: `page.toml`, the file beside the results with the text and order of the sections."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from lamella.errors import UsageError, did_you_mean
from lamella.option_errors import read_options
from lamella.section import Section
from lamella.study.compared_readers import COST_TITLES, TRAINING_FLOPS
from lamella.study.report.columns import DEFAULT_COLUMNS

LAYOUT_FILE = "page.toml"
# The costs that a report can rank readers by.
RANKING_COSTS = {
    **COST_TITLES,
    "inference_flops_per_window": "inference FLOPs",
    "training_flops_per_window": "training FLOPs per window",
    TRAINING_FLOPS: "training FLOPs",
}


class LayoutSection(Section):
    """A section of the report: its text, and the runs or the file that it shows."""

    title: str = Field(min_length=1)
    text: str = ""
    runs: list[str] = Field(default=[])  # names of result files without suffix, or patterns with *
    baseline: str | None = None  # the run that the others are compared with; by default the first
    columns: list[str] = Field(default=[])  # besides run, encoder and train data; by default the columns of the report
    file: str | None = None  # instead of runs: another JSON file in the folder, shown as a table
    rows: str | None = None  # the path of the rows in that file, such as `peers.rows`; by default the whole file

    @model_validator(mode="after")
    def _shows_one_thing(self) -> LayoutSection:
        if self.runs and self.file:
            raise ValueError("either runs or a file, not both")
        return self


class Layout(Section):
    """The text of the report, in its order."""

    title: str = "Results"
    intro: str = ""
    columns: list[str] = Field(default=list(DEFAULT_COLUMNS))  # of sections that choose none
    costs: list[str] = Field(default=list(COST_TITLES))  # to rank readers by; empty for no ranking
    names: dict[str, str] = Field(default={})  # the words for files, encoders and columns
    section: list[LayoutSection] = Field(default=[])
    elsewhere: list[str] = Field(default=[])  # JSON files in the folder that are no results of readers


def read_layout(path: Path) -> Layout:
    """Read and check the layout file of a folder of results."""
    layout = read_options(path, Layout)
    if unknown := [key for key in layout.costs if key not in RANKING_COSTS]:
        raise UsageError(
            f"{path}: costs: expected a cost to rank runs by, got {unknown[0]!r}."
            f"{did_you_mean(unknown[0], RANKING_COSTS)}"
        )
    return layout
