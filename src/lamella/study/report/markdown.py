"""A page in Markdown from result files: the words come from a `page.toml` beside them, every number from the files."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from lamella.config import RunConfig, Section
from lamella.errors import ConfigError, UnreadableError, UsageError, did_you_mean
from lamella.files import read_json, read_text
from lamella.option_errors import explain
from lamella.study.compare import (
    COSTS,
    TRAINING_FLOPS,
    Against,
    Contender,
    compare_with,
    pareto_front,
    read_contenders,
)
from lamella.study.keep import with_results
from lamella.study.records import Found, RunRecord, read_runs
from lamella.study.report.columns import COLUMNS, DEFAULT_COLUMNS, MEASURED, Labels, told_value
from lamella.study.report.provenance_section import ground_lines
from lamella.study.result_files import is_result, json_files

PAGE = "page.toml"
# What a page can rank runs by.
PAGE_COSTS = {
    **COSTS,
    "inference_flops_per_window": "inference FLOPs",
    "training_flops_per_window": "training FLOPs a window",
    TRAINING_FLOPS: "training FLOPs",
}
MADE = "<!-- Made by `lamella report` from result files and the words beside them: change those, not this page. -->"
LEGEND = (
    "EM and F1 are *cross-fitted*: every article is scored at the threshold for no answer that is best on the other "
    "articles. *At 0* nothing is tuned; *best* is the best threshold on the very questions that are scored, and so "
    "too good. Brackets beside F1 are its 95 % interval when paragraphs are drawn anew; those of a difference are of "
    "a paired bootstrap, of questions between two single runs, of paragraphs where there are several seeds. Articles "
    "are never drawn, and no draw tunes its thresholds anew: both tend to make intervals too narrow. p is McNemar's "
    "exact test on the questions that only one of the two gets exactly right. ± is the deviation between seeds. "
    "Where a run has one seed, a verdict is about these questions and says nothing of other seeds. A mean of several "
    "is ahead or behind also at questions that only a part of them gets right."
)


class PageSection(Section):
    """A part of the page: its words, and what it shows."""

    title: str = Field(min_length=1)
    text: str = ""
    runs: list[str] = Field(default=[])  # names of result files without suffix, or patterns with *
    baseline: str | None = None  # which of them the others are compared with; the first
    columns: list[str] = Field(default=[])  # besides run, encoder and train data; those of the page
    file: str | None = None  # in place of runs: another JSON file there, shown as a table
    rows: str | None = None  # where in it the rows are, `peers.rows`; itself

    @model_validator(mode="after")
    def _shows_one_thing(self) -> PageSection:
        if self.runs and self.file:
            raise ValueError("either runs or a file, not both")
        return self


class Page(Section):
    """The words of a page, in its order."""

    title: str = "Results"
    intro: str = ""
    columns: list[str] = Field(default=list(DEFAULT_COLUMNS))  # of sections of runs that choose none
    costs: list[str] = Field(default=list(COSTS))  # by which runs are ranked; none: they are not
    names: dict[str, str] = Field(default={})  # what files, encoders and columns are called on the page
    section: list[PageSection] = Field(default=[])


def result_page(paths: Sequence[str | Path], *, data: str | None = None, title: str | None = None) -> tuple[str, int]:
    """The page about some runs, and how many they are; the same bytes for the same files, wherever it is made."""
    found = with_results(read_runs(paths), data)
    words = Path(os.path.expanduser(paths[0])) / PAGE if len(paths) == 1 else None
    words = words if words and words.is_file() else None
    page = _read_page(words) if words else Page(section=[PageSection(title="Runs", runs=["*"])])
    chosen = [_chosen(section, found.runs, str(words)) for section in page.section]
    if words is not None:
        _refuse_unshown(words, page, chosen)
    labels = Labels(page.names)
    parts = [MADE, f"# {title or page.title}", page.intro.strip(), LEGEND]
    for section, of_section in zip(page.section, chosen, strict=True):
        parts += [f"## {section.title}", section.text.strip()]
        if section.file and words:
            parts.append(_file_table(words.parent / section.file, section, labels))
        elif of_section:
            parts += _runs_parts(page, section, of_section, labels, words or Path("the runs"))
    parts += ground_lines(found.runs, labels)
    return "\n\n".join(part for part in parts if part) + "\n", len(found.runs)


def _read_page(path: Path) -> Page:
    try:
        table = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UnreadableError(f"{path}: broken TOML: {error}.") from None
    try:
        page = Page.model_validate(table)
    except ValidationError as error:
        raise ConfigError(str(path), explain(error, table, Page)) from None
    if unknown := [key for key in page.costs if key not in PAGE_COSTS]:
        raise UsageError(
            f"{path}: costs: {unknown[0]!r} is none to rank runs by.{did_you_mean(unknown[0], PAGE_COSTS)}"
        )
    return page


def _chosen(section: PageSection, records: Sequence[RunRecord], where: str) -> list[RunRecord]:
    """The runs of a section in the order of its patterns."""
    found: dict[str, RunRecord] = {}
    for pattern in section.runs:
        fitting = {run.name: run for run in records if fnmatchcase(run.name, pattern)}
        if not fitting:
            hint = did_you_mean(pattern, [run.name for run in records])
            raise UsageError(f"{where}: section {section.title!r} shows {pattern!r}. No result has that name.{hint}")
        found = {**found, **{name: run for name, run in fitting.items() if name not in found}}
    return list(found.values())


def _refuse_unshown(words: Path, page: Page, chosen: Sequence[Sequence[RunRecord]]) -> None:
    """A result that is left out in silence would make the page say too little."""
    shown = {run.folder.name for of_section in chosen for run in of_section}
    shown |= {section.file for section in page.section if section.file}
    if absent := [file.name for file in json_files(words.parent) if file.name not in shown]:
        raise UsageError(f"{words}: expected a section for every result. None shows {', '.join(absent)}.")


def _runs_parts(
    page: Page, section: PageSection, records: Sequence[RunRecord], labels: Labels, where: Path
) -> list[str]:
    paragraphs, contenders = read_contenders(Found(tuple(records)))
    baseline = _baseline(section, contenders, where)
    against = {one.ours.name: one for one in compare_with(baseline, _others(contenders, baseline), paragraphs)}
    columns = section.columns or page.columns
    _refuse_unknown(columns, section, contenders, where)
    parts = [_questions_line(records[0], labels), _runs_table(columns, contenders, labels, all_=bool(section.columns))]
    parts.append("\n".join(f"- {_verdict(one)}" for one in against.values()))
    if len(contenders) > 1:
        fronts = {PAGE_COSTS[key]: pareto_front(contenders, key) for key in page.costs}
        told = [f"by {title}, {', '.join(one.name for one in front)}" for title, front in fronts.items() if front]
        parts.append(f"Unbeaten at their cost: {'; '.join(told)}." if told else "")
    if MEASURED & {*columns, *page.costs}:
        parts.append(_devices_line(contenders))
    return parts


def _others(contenders: Sequence[Contender], baseline: Contender) -> list[Contender]:
    return [one for one in contenders if one is not baseline]


def _baseline(section: PageSection, contenders: Sequence[Contender], where: Path) -> Contender:
    if section.baseline is None:
        return contenders[0]
    for one in contenders:
        if section.baseline in (one.name, *(run.name for run in one.runs)):
            return one
    hint = did_you_mean(section.baseline, [one.name for one in contenders])
    raise UsageError(
        f"{where}: section {section.title!r} compares with {section.baseline!r}, which it does not show.{hint}"
    )


def _questions_line(run: RunRecord, labels: Labels) -> str:
    assert run.kept is not None
    dev = run.kept.content["dev"]
    told = f"{dev['questions']:,} questions about {dev['paragraphs']:,} paragraphs of {labels.files(dev['files'])}"
    if run.kept.scored_at == "own":
        return f"Scored on {told}, at the models' own thresholds: nothing can be cross-fitted there."
    return f"Scored on {told}; thresholds in {run.kept.content['scores']['crossfit']['folds']} folds of its articles."


def _refuse_unknown(columns: Sequence[str], section: PageSection, contenders: Sequence[Contender], where: Path) -> None:
    options = {key for one in contenders for run in one.runs if run.kept for key in run.kept.content["options"]}
    known = [*COLUMNS, *sorted(options | set(RunConfig().flat()))]
    for key in columns:
        if key not in known:
            raise UsageError(
                f"{where}: section {section.title!r} has a column {key!r}; expected one of the page's or an option of "
                f"the run file, as learner.seed.{did_you_mean(key, known)}"
            )


def _runs_table(columns: Sequence[str], contenders: Sequence[Contender], labels: Labels, *, all_: bool) -> str:
    """Without `all_`, columns that nobody knows anything for are left out."""
    fixed = ["encoder", "train"]
    keys = [*fixed, *(key for key in columns if key not in fixed)]
    rows = [{"run": one.name, **{key: labels.cell(key, one) for key in keys}} for one in contenders]
    if not all_:
        keys = [key for key in keys if key in fixed or any(row[key] != "–" for row in rows)]
    if any(len(one.runs) > 1 for one in contenders) and "seeds" not in keys:
        keys.insert(len(fixed), "seeds")
        rows = [{**row, "seeds": labels.cell("seeds", one)} for row, one in zip(rows, contenders, strict=True)]
    titles = {"run": "run", **{key: labels.title(key) for key in keys}}
    left = {"run", "tuning", "device", *fixed}
    return _table(
        list(titles.values()), [[row[key] for key in titles] for row in rows], [key in left for key in titles]
    )


def _verdict(one: Against) -> str:
    chance = "" if one.p is None else f", p = {one.p:.3f}" if one.p >= 0.001 else ", p < 0.001"
    if max(len(one.ours.runs), len(one.theirs.runs)) > 1:
        return (
            f"{one.verdict} ({one.ours.name} is ahead at {one.won} questions, {one.theirs.name} at {one.lost}{chance})"
        )
    return f"{one.verdict} ({one.ours.name} alone is right {one.won} times, {one.theirs.name} {one.lost} times{chance})"


def _devices_line(contenders: Sequence[Contender]) -> str:
    """Where times were measured; they compare within one place only."""
    places: dict[str, list[str]] = {}
    for one in contenders:
        cost = one.runs[0].cost
        if device := cost.get("device"):
            places.setdefault(f"{device} ({cost.get('precision', 'fp32')})", []).append(one.name)
    if not places:
        return ""
    told = [place + (f": {', '.join(names)}" if len(places) > 1 else "") for place, names in places.items()]
    return f"Times and memory were measured on {'; on '.join(told)}."


def _file_table(path: Path, section: PageSection, labels: Labels) -> str:
    """A JSON file that is no result, as a table: a list of objects, an object of objects, or one object."""
    content = read_json(path)
    if is_result(content):
        raise UsageError(f"{path}: is the result of a run; section {section.title!r} shows those with runs.")
    rows = _within(content, section.rows) if section.rows else content
    if isinstance(rows, Mapping) and rows and all(isinstance(one, Mapping) for one in rows.values()):
        rows = [{"name": name, **one} for name, one in rows.items()]
    if isinstance(rows, Mapping):
        rows = [rows]
    if not isinstance(rows, list) or not rows or not all(isinstance(one, Mapping) for one in rows):
        raise UsageError(
            f"{path}: expected objects to show as rows{f' at {section.rows}' if section.rows else ''}, for section "
            f"{section.title!r} of {PAGE}."
        )
    scalar = [key for key, value in rows[0].items() if not isinstance(value, Mapping | list)]
    keys = section.columns or scalar
    cells = [[told_value(_within(row, key)) for key in keys] for row in rows]
    if absent := [key for place, key in enumerate(keys) if all(row[place] == "–" for row in cells)]:
        raise UsageError(f"{path}: expected {', '.join(absent)} in its rows, for section {section.title!r} of {PAGE}.")
    words = [any(isinstance(_within(row, key), str) for row in rows) for key in keys]
    return _table([labels.names.get(key, key.replace("_", " ")) for key in keys], cells, words)


def _within(content: Any, key: str) -> Any:
    """`peers.rows` is what is under `rows` of what is under `peers`; None where there is none."""
    for name in key.split("."):
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool]) -> str:
    """Words to the left, numbers to the right."""
    lines = [titles, ["---" if one else "---:" for one in left], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
