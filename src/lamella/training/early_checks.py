"""Checks of a plan that need no model: they run first, so that a mistake shows at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella import registry, runs
from lamella.config import RunConfig
from lamella.data.demo import data_path
from lamella.errors import ConfigError, UnreadableError, UsageError, counted
from lamella.models.encoder_depth import encoder_depth, encoder_positions
from lamella.plan import Pass, Plan
from lamella.training.folders import RunFolders


def check_before_loading(
    plan: Plan, folders: RunFolders, splits: Sequence[str], *, overwrite: bool, cached: bool = False
) -> None:
    """Check the output folders, the data files of some `splits`, metrics, losses and caching, of all passes."""
    read = [folder for configs in plan.passes for folder in folders_read(configs)]
    runs.check_run_folder(folders.out, overwrite=overwrite, needs=read)
    if folders.several:
        for folder in folders.by_run.values():
            runs.check_run_folder(folder, overwrite=True)
    for configs in plan.passes:
        config = next(iter(configs.values()))
        check_data_files(config, splits, where=plan.where)
        if cached:
            check_cacheable(config)
    for config in plan.runs.values():
        _check_metric_fits_task(config)
        _check_loss_fits_task(config)
        _check_mixer_options(config)
    check_depths(plan.runs)
    check_lengths(plan.runs)


def folders_read(configs: Pass) -> list[Path]:
    """Return the folders on disk that runs name as their encoder, their warm start or their teachers."""
    names = [
        name
        for config in configs.values()
        for name in (*config.model_names, *(teacher.name for teacher in config.learner.teacher_folders))
    ]
    paths = [os.path.expanduser(name) for name in dict.fromkeys(names)]
    return [Path(path) for path in paths if os.path.isdir(path)]


def check_data_files(config: RunConfig, splits: Sequence[str], *, where: str) -> None:
    """Check that there is training data and that all files of some splits exist."""
    if not config.data.train:
        raise ConfigError(where, ["data.train: is required and was not given."])
    for split in splits:
        for name in config.data.files(split):
            path = data_path(name)
            if not os.path.exists(path):
                raise UnreadableError(f"{path}: no such file; data.{split} names it.")


def check_depths(configs: Mapping[str, RunConfig]) -> None:
    """Check that no run trains or reads more layers than its encoder has, where the encoder is on this machine.

    Tables of runs name layers, and another encoder (`--set encoder.name`) may have fewer.
    """
    too_deep: dict[tuple[str, int], list[str]] = {}
    for run, config in configs.items():
        wanted = _layers_named(config)
        name = _encoder_name(config, configs) if wanted else None
        depth = encoder_depth(name) if name is not None else None
        if name is not None and depth is not None:
            excess = [f"{run} ({option} = {layer})" for option, layer in wanted.items() if layer > depth]
            too_deep[name, depth] = [*too_deep.get((name, depth), []), *excess]
    problems = [
        f"{name} has {counted(depth, 'layer')}, too few for {', '.join(named)}"
        for (name, depth), named in too_deep.items()
        if named
    ]
    if problems:
        raise UsageError(f"encoder.name: {'; '.join(problems)}. Choose another encoder, or leave out these runs.")


def check_lengths(configs: Mapping[str, RunConfig]) -> None:
    """Check that no run has windows longer than its encoder has positions, where the encoder is on this machine."""
    for run, config in configs.items():
        if "windows.max_seq_length" in config.inherited_options:
            continue
        name, length = _encoder_name(config, configs), config.windows.max_seq_length
        positions = encoder_positions(name) if name is not None else None
        if positions is not None and length > positions:
            where = f"{run}: " if len(configs) > 1 else ""
            raise UsageError(
                f"{where}windows.max_seq_length: expected at most {positions}, the number of positions of {name}, got "
                f"{length}."
            )


def _layers_named(config: RunConfig) -> dict[str, int]:
    """Return the highest layer, or the number of layers, that each option of a run names."""
    tuning, layers = config.encoder.tuning, config.learner.layers
    option = registry.trait("tuning", tuning, "top_layers")
    named = {f"encoder.tuning.{option}": int(tuning[option])} if option in tuning else {}
    return named | ({"learner.layers": max(layers)} if isinstance(layers, list) and layers else {})


def _encoder_name(config: RunConfig, configs: Mapping[str, RunConfig]) -> str | None:
    """Return the name of the encoder below a run; None if it starts from a run that is not among `configs`."""
    seen: set[str] = set()
    while config.encoder.from_run is not None:
        run = config.encoder.from_run.partition("@")[0]
        if run in seen or run not in configs:
            return None
        seen.add(run)
        config = configs[run]
    return config.learner.start if "encoder.name" in config.inherited_options else config.encoder.name


def check_cacheable(config: RunConfig) -> None:
    """Check that hidden states on disk can stand in for the encoder."""
    if registry.trait("tuning", config.encoder.tuning, "trains_encoder"):
        raise ConfigError(
            "encoder.tuning", ["expected frozen: the hidden states of a trained encoder change at every step."]
        )
    if config.data.augment is not None:
        raise ConfigError(
            "data.augment", ["expected none with a cache: augmented texts change every epoch, and no cache holds them."]
        )


def default_metric(task: str) -> str:
    """Return the metric that selects the best checkpoint of a task if `training.metric` is not set."""
    make: Any = registry.part("task", task).make  # a class of heads/tasks.py, or of a plugin
    return str(make.headline[1])


def _check_metric_fits_task(config: RunConfig) -> None:
    metric, task = config.training.metric, config.learner.task["name"]
    gives_text = not getattr(registry.part("task", task).make, "at_cls", False)
    if metric is not None and config.data.dev and not gives_text and not metric.startswith("answerability"):
        problem = f"expected an answerability metric for the task {task}, which gives no text, got {metric}."
        raise ConfigError("training.metric", [problem])


def _check_loss_fits_task(config: RunConfig) -> None:
    """Check that the task has every choice that the loss weighs; the weight would have no effect."""
    (task, _), (loss, options) = registry.split(config.learner.task), registry.split(config.learner.loss)
    choices: Sequence[str] = registry.part("task", task).make.choice_names  # type: ignore[attr-defined]
    weighed: Sequence[str] = getattr(registry.part("loss", loss).make, "weighs_choices", ())
    for option in weighed:
        if option not in choices and options.get(option, 1) != 1:
            problem = f"expected no {option}, which the task {task} does not choose, got {options[option]:g}."
            raise ConfigError("learner.loss", [problem])


def _check_mixer_options(config: RunConfig) -> None:
    """Check that no option of a mixer is set that has no effect with the others.

    Only before training: a saved model loads whatever it was trained with.
    """
    problems = []
    for spec in (*config.learner.mixer, *config.learner.beside):
        name, given = registry.split(spec)
        part = registry.part("mixer", name)
        defaults, options = {option.name: option.default for option in part.options}, part.resolved(given)
        for option, condition in registry.trait("mixer", spec, "needs").items():
            for other, values in condition.items():
                if options[option] != defaults[option] and options[other] not in values:
                    choices = " or ".join(f'{other} = "{value}"' for value in values)
                    problems.append(
                        f'{name}.{option}: {options[option]} has no effect with {other} = "{options[other]}"; '
                        f"remove it, or set {choices}."
                    )
    if problems:
        raise ConfigError("learner.mixer", problems)
