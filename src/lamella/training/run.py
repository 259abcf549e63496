"""A training run from its plan to finished run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.config import RunConfig
from lamella.errors import DivergedError, RunError
from lamella.files import read_json, write_json
from lamella.plan import Pass, Plan
from lamella.stopwatch import Stopwatch
from lamella.training.batch_splitting import Splitter
from lamella.training.bookkeeping import PassWatcher, headline
from lamella.training.checkpoint import load_checkpoint, put_checkpoint
from lamella.training.learner import Record
from lamella.training.loop import fit
from lamella.training.overfit import overfit_plan, verdict
from lamella.training.prepare import Prepared, Say, located, named_folders, prepare
from lamella.training.processes import Processes, make_accelerator
from lamella.training.provenance import refuse_changed
from lamella.training.steps import BEGINNING
from lamella.training.training_cost import write_costs


def train_plan(
    plan: Plan,
    out: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    auto_batch: bool = False,
    overfit: int | None = None,
    cache: Path | None = None,
    runs_in: Path | None = None,
    say: Say = print,
) -> dict[str, Record]:
    """Train every run of a plan: one into `out` itself, several each into a folder of its name there.

    With `runs_in` the folders of several lie there instead, and `out` holds only what they need while they train.
    With `resume` what is finished stays, and a pass goes on from its last checkpoint. Gives the best scores of every
    run that was trained now, the same in all processes.
    """
    plan = replace(plan, passes=tuple(located(configs, runs_in or out.parent) for configs in plan.passes))
    if overfit is not None:
        plan = overfit_plan(plan)
    trackers = next(iter(plan.runs.values())).training.trackers
    processes = Processes(make_accelerator(trackers, out))
    if not processes.is_main:
        say = _silent
    if auto_batch and processes.count > 1:
        raise RunError("--auto-batch: expected one process; several would have to run out of memory together.")
    state = processes.from_main(runs.run_state(out) if out.exists() else None)
    if resume and state == "finished":
        say(f"{out}: is finished already")
        return {}
    best: dict[str, Record] = {}
    targets: dict[str, float] = {}
    several, checkpoint = len(plan.runs) > 1, out / runs.CHECKPOINT
    home = {name: (runs_in or out) / name if several else out for name in plan.runs}
    # A single run without a checkpoint has nothing to go on from; of several, some may be finished.
    goes_on = processes.from_main(resume and state is not None and (several or checkpoint.is_file()))
    if resume and state is not None:
        _refuse_other_runs(out, list(plan.runs) if several else [])
        _refuse_other_options(plan.runs, home)
        if several:
            refuse_changed({home[name]: plan.runs[name] for name in plan.runs}, advice="Start anew with --overwrite.")
    ready = [prepare(plan.passes[0], processes, overfit=overfit, cache=cache, say=say)]  # before a folder is touched
    opened = runs.new_run(
        out,
        "train",
        overwrite=overwrite or resume,
        resume=goes_on,
        needs=(*ready[0].needs, *(folder for configs in plan.passes[1:] for folder in named_folders(configs))),
        within=plan.runs if several else (),
        files=None if several else ready[0].files,
    )
    with opened if processes.is_main else nullcontext():
        for number, configs in enumerate(plan.passes):
            folders = {name: home[name] for name in configs}
            prepared = ready.pop() if ready else None
            if goes_on and all(runs.is_over(folder) for folder in folders.values()):
                continue
            prepared = prepared or prepare(configs, processes, overfit=overfit, cache=cache, say=say)
            if len(plan.passes) > 1:
                say(f"pass {number + 1} of {len(plan.passes)}: {', '.join(configs)}")
            content = load_checkpoint(checkpoint, list(configs), processes, prepared.made_from) if goes_on else None
            try:
                with ExitStack() as stack:
                    stack.callback(prepared.feed.close)
                    for folder in folders.values() if several and processes.is_main else ():
                        stack.enter_context(
                            runs.new_run(
                                folder, "train", overwrite=True, resume=content is not None, files=prepared.files
                            )
                        )
                    train_pass(
                        prepared, folders, checkpoint, processes, content=content, auto_batch=auto_batch, say=say
                    )
            except DivergedError as error:
                if number == len(plan.passes) - 1 and not any(best.values()):  # nothing came of any
                    raise
                say(f"{', '.join(configs)}: {error}")
                for learner in prepared.learners:
                    learner.failed = learner.failed or str(error)
            best |= {learner.name: learner.best for learner in prepared.learners}
            targets |= prepared.targets
            if processes.is_main:
                for learner in prepared.learners:
                    if learner.failed:
                        runs.mark_diverged(folders[learner.name], learner.failed)
                checkpoint.unlink(missing_ok=True)
            del prepared  # the next pass may need its memory
        if processes.is_main:
            checkpoint.unlink(missing_ok=True)  # of a pass that had just ended when it was killed
        if several and runs_in is None and processes.is_main:
            summarise(plan, out, say)
        for line in verdict(best, targets):
            say(line)
    if trackers:
        processes.accelerator.end_training()
    say(f"{out}: finished")
    return best


def train_pass(
    run: Prepared,
    folders: Mapping[str, Path],
    checkpoint: Path,
    processes: Processes,
    *,
    content: Mapping[str, Any] | None = None,
    auto_batch: bool = False,
    say: Say,
) -> None:
    """Train the learners of a pass into their open run folders, from its beginning or from a checkpoint's content."""
    options, steps, learners = run.any_config.training, run.steps, run.learners
    start, splitter = BEGINNING, Splitter(automatic=auto_batch, say=say)
    if content:
        start = put_checkpoint(content, learners, processes)
        splitter.pieces = content["pieces"]
        say(f"resuming after step {start.step} of {steps.total}")
    if processes.is_main:
        for name, folder in folders.items():
            write_json(folder / runs.CONFIG, run.configs[name].model_dump(mode="json"))
            _cut(folder / runs.HISTORY, content["histories"][name] if content else 0)
    if options.trackers:
        processes.accelerator.init_trackers("lamella", config=_flat(run.any_config))
    watcher = PassWatcher(
        learners,
        folders,
        checkpoint,
        run.dev,
        options,
        processes,
        splitter=splitter,
        encode_dev=run.encode_dev,
        targets=run.targets,
        made_from=run.made_from,
        earlier=content["seconds"] if content else 0.0,
        say=say,
    )
    together = f" for {len(learners)} learners at once" if len(learners) > 1 else ""
    together += f", {processes.count} processes" if processes.count > 1 else ""
    say(
        f"training on {len(steps.ranks)} questions in {steps.windows} windows: {steps.total} steps{together}, "
        f"{learners[0].model.precision} on {processes.device.type}"
    )
    late = [epoch for epoch in options.save_at if epoch > steps.total / max(1, steps.per_epoch) + 1e-9]
    if late:
        say(f"training.save_at: the run ends before epoch {min(late):g}, so that nothing is kept there")
    for learner in learners:
        if learner.objective.more_forwards:
            times = learner.objective.more_forwards
            say(f"{learner.name}: its teacher runs an encoder {times} times more on every batch")
        if learner.objective.remark:
            say(f"{learner.name}: {learner.objective.remark}")
    with Stopwatch() as training:
        fit(learners, steps, options, processes, watcher, encode=run.encode, start=start, split=splitter)
    pass_seconds = watcher.pass_seconds
    say(f"trained in {training.seconds:.0f} s")
    for learner in learners:
        if learner.recorded is not None and (problem := learner.recorded.problem):
            say(f"{learner.name}: its steps could not be recorded for the GPU, and took longer: {problem}")
        learner.recorded = None  # it holds memory that what follows may need
    if len(run.threshold):
        watcher.tune_thresholds(run.threshold, run.any_config.data.threshold)
    if processes.is_main:
        write_costs(run, folders, processes, watcher, pass_seconds=pass_seconds)
    for learner in learners:
        front = f"{learner.name}: " if len(learners) > 1 else ""
        if learner.ended:
            say(f"{front}ended at step {learner.steps}: {learner.ended}")
        if learner.best:
            scores = headline(learner.model, learner.best, options.metric)
            say(f"{front}best at epoch {learner.best['epoch']:g}: {scores}")
    if all(learner.failed for learner in learners):
        raise DivergedError(str(learners[0].failed))


def summarise(plan: Plan, out: Path, say: Say) -> None:
    """Write what the runs differ in beside what they scored."""
    rows = []
    for name in plan.runs:
        path = out / name / runs.RESULTS
        scores = read_json(path) if path.is_file() else {}
        rows.append({"run": name, "options": dict(plan.varied[name]), "scores": scores})
    varied = sorted({key for row in rows for key in row["options"]})
    write_json(out / runs.SUMMARY, {"varied": varied, "runs": rows})
    if varied:
        say(f"runs differ in {', '.join(varied)}; see {out / runs.SUMMARY}")


def _refuse_other_runs(out: Path, names: Sequence[str]) -> None:
    """A folder goes on with the runs it has; others would replace them."""
    command, there = runs.kind_of_run(out) or ("train", list(names))
    if command != "train" or there != list(names):
        found = f"the runs {', '.join(there)}" if there else "one run" if command == "train" else f"a run of {command}"
        wanted = f"the runs {', '.join(names)}" if names else "one run"
        raise RunError(
            f"{out}: holds {found}, and the run file describes {wanted}; resume it with its own run file, choose "
            "another --out, or start anew with --overwrite."
        )


def _refuse_other_options(configs: Pass, folders: Mapping[str, Path]) -> None:
    """A run goes on as it began: with other options its result would be neither the one nor the other."""
    for name, config in configs.items():
        path = folders[name] / runs.CONFIG
        if not path.is_file():
            continue
        then = read_json(path)
        for key, value in config.flat().items():
            section, _, option = key.partition(".")
            before = then.get(section, {}).get(option)
            if before != value:
                raise RunError(
                    f"{path}: the run began with {key} = {before!r}. Got {value!r}; resume it with the options it "
                    "began with, or start anew with --overwrite."
                )


def _flat(config: RunConfig) -> dict[str, Any]:
    """The options as trackers take them: by one name each, and of simple types."""
    simple = (bool, int, float, str)
    return {key: value if isinstance(value, simple) else str(value) for key, value in config.flat().items()}


def _cut(path: Path, length: int) -> None:
    """Forget what a history says of the time after a checkpoint."""
    if path.is_file():
        with path.open("r+b") as file:
            file.truncate(length)


def _silent(line: str) -> None:
    pass
