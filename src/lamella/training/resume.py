"""Whether a plan may continue what its run folders hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lamella import runs
from lamella.config import RunConfig
from lamella.errors import RunError
from lamella.files import read_json
from lamella.plan import Plan
from lamella.training.early_checks import default_metric
from lamella.training.folders import RunFolders
from lamella.training.provenance import check_unchanged


@dataclass(frozen=True)
class ResumeState:
    """What of an earlier run is left to do; by default there is none, and training starts from the beginning."""

    finished: bool = False  # nothing is left
    continues: bool = False  # the files of the earlier run stay, and its checkpoint is loaded

    def skips(self, folders: Iterable[Path]) -> bool:
        """Whether all runs of a pass are over already."""
        return self.continues and all(runs.is_over(folder) for folder in folders)


def read_resume_state(plan: Plan, folders: RunFolders) -> ResumeState:
    """Look at what the folders hold; raise where it is not an earlier stage of the same runs."""
    out = folders.out
    runs.check_resumable(out)
    finished = runs.run_state(out) == "finished"
    _check_same_runs(out, list(plan.runs) if folders.several else [])
    by_folder = {folders.by_run[name]: config for name, config in plan.runs.items()}
    instead = "It is finished: choose another --out" if finished else "Resume it with the options it began with"
    check_same_options(by_folder, advice=f"{instead}, or start again from scratch with --overwrite.")
    if finished:
        return ResumeState(finished=True)
    if folders.several:
        check_unchanged(by_folder, advice="Start again from scratch with --overwrite.")
    # A single run without a checkpoint has nothing to continue; of several, some may be finished.
    return ResumeState(continues=folders.several or folders.checkpoint.is_file())


def check_same_options(configs: Mapping[Path, RunConfig], *, advice: str) -> None:
    """Check that the runs in some folders have the options that are asked for now.

    Options that were not resolved yet are not compared: those left to the warm start, and `encoder.from`. An option
    that a folder does not record did not exist then, and had the effect of its default.
    """
    defaults = RunConfig().flat()
    for folder, config in configs.items():
        path = folder / runs.CONFIG
        if not path.is_file():
            continue
        recorded = read_json(path)
        unresolved = {*config.inherited_options, *(("encoder.name", "encoder.from") if config.encoder.from_run else ())}
        for key, value in config.flat().items():
            section, _, option = key.partition(".")
            before = recorded.get(section, {}).get(option, defaults[key])
            if (
                key == "training.metric"
                and value is None
                and before == default_metric(recorded["learner"]["task"]["name"])
            ):
                continue  # unset now, and resolved when the run began
            if key not in unresolved and before != value:
                raise RunError(f"{path}: this run began with {key} = {before!r}, got {value!r}. {advice}")


def _check_same_runs(out: Path, names: list[str]) -> None:
    """A folder continues with the runs it holds; others would replace them."""
    command, held = runs.kind_of_run(out) or ("train", names)
    if command == "train" and held == names:
        return
    holds = f"the runs {', '.join(held)}" if held else "one run" if command == "train" else f"a run of {command}"
    described = f"the runs {', '.join(names)}" if names else "one run"
    raise RunError(
        f"{out}: holds {holds}, but the run file describes {described}; resume it with its own run file, choose "
        "another --out, or start again from scratch with --overwrite."
    )
