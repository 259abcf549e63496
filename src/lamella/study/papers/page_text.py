"""The text of the papers' pages: `papers.toml`, a file beside the results with introductions and rows of our own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import Field

from lamella.errors import UsageError
from lamella.option_errors import read_options
from lamella.section import Section
from lamella.study.papers.published_tables import PAPERS, find_tables

TEXT_FILE = "papers.toml"


class BeyondOptions(Section):
    """Rows that the paper does not have, compared with one that it has."""

    title: str = Field(min_length=1)
    text: str = ""
    baseline: str = Field(pattern=r"^[^/]+/[^/]+$")  # RUN_FILE/RUN; the other rows are runs of this run file
    runs: list[str] = Field(default=["*"])  # patterns of their names without seeds


class AnalysisOptions(Section):
    """Tables of an analysis of some runs, which `lamella analyse` wrote."""

    title: str = Field(min_length=1)
    text: str = ""
    file: str  # an analysis.json; relative to the text file
    tables: list[str] = Field(default=[])  # their names, such as second_best or context_length; by default all


class PageText(Section):
    """The text of one page; texts are Markdown."""

    paper: str
    file: str = Field(min_length=1)  # the page, as the summary links it
    title: str = ""  # by default that of the paper
    intro: str = ""
    tables: list[str] = Field(default=[])  # the ids of the paper's tables that it shows; by default all
    # Which runs have times that mean something, because they had the device to themselves: all, none, or those whose
    # names match a pattern, such as "*-seed1". Other times are not shown.
    times: bool | list[str] = True
    beyond: list[BeyondOptions] = Field(default=[])
    analysis: list[AnalysisOptions] = Field(default=[])

    def has_time(self, run: str) -> bool:
        """Return whether the times of a run mean something."""
        return self.times if isinstance(self.times, bool) else any(fnmatchcase(run, each) for each in self.times)


class PaperTexts(Section):
    """The text of all pages, and of the summary."""

    title: str = "Published findings, and what was found here"
    intro: str = ""
    undecided: str = ""  # below the summary's table of findings that are not decided
    names: dict[str, str] = Field(default={})  # the words for encoders, files, runs, and the weights of a short hash
    page: list[PageText] = Field(default=[])

    def of(self, paper: str) -> PageText:
        """Return the text of a paper's page; it is empty if the file has none."""
        pages = [page for page in self.page if page.paper == paper]
        return pages[0] if pages else PageText(paper=paper, file=f"{paper}.md")


def read_texts(paths: Sequence[str | os.PathLike[str]]) -> PaperTexts:
    """Read the text file of the first folder that has one; without any, all texts are empty."""
    files = [Path(os.path.expanduser(path)) / TEXT_FILE for path in paths]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return PaperTexts()
    texts = read_options(file, PaperTexts)
    if unknown := [page.paper for page in texts.page if page.paper not in PAPERS]:
        raise UsageError(f"{file}: page.paper: expected one of {', '.join(PAPERS)}, got {unknown[0]!r}.")
    for page in texts.page:
        known = [table.id for table in find_tables(page.paper)[1]]
        if unknown := [table for table in page.tables if table not in known]:
            raise UsageError(f"{file}: page.tables: expected some of {', '.join(known)}, got {unknown[0]!r}.")
    pages = [
        page.model_copy(update={"analysis": [_locate(analysis, file.parent) for analysis in page.analysis]})
        for page in texts.page
    ]
    return texts.model_copy(update={"page": pages})


def _locate(analysis: AnalysisOptions, folder: Path) -> AnalysisOptions:
    return analysis.model_copy(update={"file": str(folder / analysis.file)})
