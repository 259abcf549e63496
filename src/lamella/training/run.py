"""Train the runs of a plan into their run folders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from lamella import runs
from lamella.cores import CoreMeter
from lamella.errors import DivergedError, RunError
from lamella.files import read_json, write_json
from lamella.plan import Pass, Plan
from lamella.progress import Log, silent
from lamella.training.early_checks import check_before_loading, folders_read
from lamella.training.fitting.checkpoint import load_checkpoint
from lamella.training.fitting.interrupts import StopSignals
from lamella.training.fitting.learner import Record
from lamella.training.fitting.processes import Processes, make_accelerator
from lamella.training.folders import RunFolders
from lamella.training.memory_check import check_memory
from lamella.training.overfit import check_memorised, overfit_plan
from lamella.training.prepare import PreparedPass, prepare_pass, resolve_references
from lamella.training.resume import ResumeState, read_resume_state
from lamella.training.splits import SPLITS
from lamella.training.threads import sharing_cores
from lamella.training.train_pass import train_pass


def train_plan(
    plan: Plan,
    out: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    auto_batch: bool = False,
    overfit: int | None = None,
    cache: Path | None = None,
    runs_folder: Path | None = None,
    log: Log = silent,
) -> dict[str, Record]:
    """Train every run of a plan, and return the scores of each run that was trained now.

    A single run is written into `out`, several runs each into `out/NAME`. With `runs_folder`, several runs go there
    and `out` holds only what they need while they train. All processes return the same scores.

    Args:
        plan: The checked runs; `load_plan` reads them from a run file, `make_plan` from a table of options.
        out: The run folder to write.
        overwrite: Replace the run that `out` holds.
        resume: Continue the run that `out` holds, from its last checkpoint; finished runs stay as they are.
        auto_batch: On out-of-memory, split the batch and retry.
        overfit: Only check that this many training questions can be memorised.
        cache: A folder of hidden states that `lamella extract` wrote.
        runs_folder: Where the folders of several runs lie, if not in `out`.
        log: Receives each line that is reported; silent by default.

    Raises:
        InterruptedTrainingError: After SIGINT (Ctrl-C) or SIGTERM, once the current step is done and a checkpoint is
            written. It is a `KeyboardInterrupt`; `resume=True` continues to the same result.
    """
    plan = _resolve(plan, runs_folder or out.parent, overfit)
    folders = RunFolders.of(plan, out, runs_folder)
    splits = SPLITS if overfit is None else ("train",)
    trackers = next(iter(plan.runs.values())).training.trackers
    processes = Processes(make_accelerator(trackers, out))
    log = log if processes.is_main else silent
    if auto_batch and processes.count > 1:
        raise RunError(
            "--auto-batch: expected one process, got several; they would have to run out of memory together."
        )
    # The main process alone looks at folders and files and reports mistakes, before anything is loaded or written.
    resume_state = ResumeState()
    if processes.is_main and resume:
        resume_state = read_resume_state(plan, folders)
    if processes.is_main and not resume_state.finished:
        check_before_loading(plan, folders, splits, overwrite=overwrite or resume, cached=cache is not None)
    resume_state = processes.broadcast(resume_state)
    if resume_state.finished:
        log(f"{out}: already finished")
        return {}

    trainer = PlanTrainer(
        plan=plan,
        folders=folders,
        processes=processes,
        resume_state=resume_state,
        prepare=functools.partial(prepare_pass, processes=processes, overfit=overfit, cache=cache, log=log),
        auto_batch=auto_batch,
        stop=StopSignals(single_process=processes.count == 1),
        log=log,
    )
    trainer.train(overwrite=overwrite or resume, summary=runs_folder is None)
    if trackers:
        processes.accelerator.end_training()
    if runs_folder is None:  # otherwise the folder is one of the sweep's own, which reports the runs
        log(f"{out}: finished")
    return trainer.scores


@dataclass
class PlanTrainer:
    """Trains the passes of a plan one after the other."""

    plan: Plan
    folders: RunFolders
    processes: Processes
    resume_state: ResumeState
    prepare: Callable[[Pass], PreparedPass]
    auto_batch: bool
    stop: StopSignals
    log: Log
    scores: dict[str, Record] = field(default_factory=dict)  # by run, of its saved model
    targets: dict[str, float] = field(default_factory=dict)  # of the overfit check
    meter: CoreMeter = field(default_factory=CoreMeter)  # since the preparation of a pass

    def train(self, *, overwrite: bool, summary: bool) -> None:
        """Train the passes that are not over; with `summary`, write the scores of several runs side by side."""
        left = [
            (number, configs)
            for number, configs in enumerate(self.plan.passes, 1)
            if not self.resume_state.skips(self.folders.of_pass(configs).values())
        ]
        prepared = self._prepare(left[0][1]) if left else None  # before a folder is touched
        with self._open_run(prepared, overwrite) if self.processes.is_main else nullcontext():
            for number, configs in left:
                prepared = prepared or self._prepare(configs)
                if len(self.plan.passes) > 1:
                    self.log(f"pass {number} of {len(self.plan.passes)}: {', '.join(configs)}")
                self._train_pass(prepared, is_last=number == len(self.plan.passes))
                prepared = None  # the next pass may need its memory
                if number < len(self.plan.passes) and self.processes.any(self.stop.received is not None):
                    raise self.stop.interruption(
                        f"training was interrupted after pass {number} of {len(self.plan.passes)}"
                    )
            if self.processes.is_main:
                self.folders.checkpoint.unlink(missing_ok=True)  # left by a kill just after its pass had ended
                if self.folders.several and summary:
                    write_summary(self.plan, self.folders.out, self.log)
            for line in check_memorised(self.scores, self.targets):
                self.log(line)

    def _prepare(self, configs: Pass) -> PreparedPass:
        self.meter = CoreMeter()
        prepared = self.prepare(configs)
        if self.processes.count == 1:  # several could disagree, and those that go on would wait for the others
            check_memory(prepared, self.processes.device, auto_batch=self.auto_batch)
        return prepared

    def _open_run(self, prepared: PreparedPass | None, overwrite: bool) -> AbstractContextManager[Path]:
        several = self.folders.several
        return runs.new_run(
            self.folders.out,
            "train",
            overwrite=overwrite,
            resume=self.resume_state.continues,
            needs=[
                *(prepared.needs if prepared else ()),
                *(folder for configs in self.plan.passes for folder in folders_read(configs)),
            ],
            within=self.plan.runs if several else (),
            files=prepared.files if prepared and not several else None,
        )

    def _train_pass(self, prepared: PreparedPass, *, is_last: bool) -> None:
        """Train one pass; one that diverges does not stop the others, unless nothing came of any."""
        folders = self.folders.of_pass(prepared.configs)
        try:
            self._train_into(prepared, folders)
        except DivergedError as error:
            if is_last and not any(self.scores.values()):
                raise
            self.log(f"{', '.join(prepared.configs)}: {error}")
            for learner in prepared.learners:
                learner.failed = learner.failed or str(error)
        self.scores |= {learner.name: learner.kept for learner in prepared.learners}
        self.targets |= prepared.targets
        if self.processes.is_main:
            for learner in prepared.learners:
                if learner.failed:
                    runs.mark_diverged(folders[learner.name], learner.failed)
            self.folders.checkpoint.unlink(missing_ok=True)

    def _train_into(self, prepared: PreparedPass, folders: Mapping[str, Path]) -> None:
        """Open the run folders of a pass, unless `out` is the only one, and train from the last checkpoint."""
        checkpoint = None
        if self.resume_state.continues:
            checkpoint = load_checkpoint(self.folders.checkpoint, list(folders), self.processes, prepared.source_hashes)
        with ExitStack() as stack:
            stack.callback(prepared.windows.feed.close)
            if self.processes.count == 1 and self.processes.device.type == "cpu":
                before = None if checkpoint is None else checkpoint.threads
                stack.enter_context(sharing_cores(self.meter, self.log, before=before))
            for folder in folders.values() if self.folders.several and self.processes.is_main else ():
                stack.enter_context(
                    runs.new_run(folder, "train", overwrite=True, resume=checkpoint is not None, files=prepared.files)
                )
            train_pass(
                prepared,
                folders,
                self.folders.checkpoint,
                self.processes,
                checkpoint=checkpoint,
                auto_batch=self.auto_batch,
                stop=self.stop,
                log=self.log,
            )


def write_summary(plan: Plan, out: Path, log: Log) -> None:
    """Write `runs.json`: what the runs differ in, with the scores of each."""
    rows = []
    for name in plan.runs:
        path = out / name / runs.RESULTS
        scores = read_json(path) if path.is_file() else {}
        rows.append({"run": name, "options": dict(plan.varied[name]), "scores": scores})
    varied = sorted({key for row in rows for key in row["options"]})
    write_json(out / runs.SUMMARY, {"varied": varied, "runs": rows})
    if varied:
        log(f"runs differ in {', '.join(varied)}; see {out / runs.SUMMARY}")


def _resolve(plan: Plan, runs_folder: Path, overfit: int | None) -> Plan:
    """Replace references by what they mean, and put in the options of the overfit check."""
    passes = [resolve_references(configs, runs_folder) for configs in plan.passes]
    plan = replace(plan, passes=tuple(passes))
    return plan if overfit is None else overfit_plan(plan)
