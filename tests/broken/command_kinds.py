"""The kinds of files again, through the commands that their own kind leaves out, on onnxruntime and on torch.

Each input goes through one of the commands, in turn, so that all inputs together try all of them: every command on
every input would take hours.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from broken.damage import Damage
from broken.data_kinds import TITAN, squad
from broken.json_damage import broken_toml, dump_toml
from broken.kind import Files, Folders, Kind, damage_file
from broken.model_kinds import calibrated_reader, reader_above, tampered_model
from broken.oracle import Outcome, run_command
from lamella import plugins, registry
from lamella.config import RunConfig
from tiny_reader import WINDOWS, save_tiny_bert, save_tiny_reader

Command = Sequence[object] | Callable[[], Outcome]
Commands = Callable[[Folders], Iterator[Command]]

# A precision chooses the backend, whatever the processor: fp32 is computed by onnxruntime, bf16 by torch.
ONNX, TORCH = ("--precision", "fp32"), ("--precision", "bf16")
BACKENDS = (ONNX, TORCH)
EXPORTS = ("onnx", "half", "flatten", "as-transformers")
ASKED = {"question": "Who discovered Titan?", "context": TITAN}


def through(kind: Kind, commands: Commands, *, sampled: int = 3) -> Kind:
    """Return a kind with the inputs of another one, which go through other commands."""

    def sound(folder: Path, beside: Path) -> None:
        kind.sound(folder, beside)
        _add_sound_files(beside)

    name, needs = f"{kind.name}, other commands", sorted({*kind.needs, "torch"})
    return replace(kind, name=name, commands=commands, needs=needs, sound=sound, again=True, each=1, sampled=sampled)


def _add_sound_files(beside: Path) -> None:
    """Write what the commands read beside the damaged file: data, an encoder, a reader and a run file."""
    if not (beside / "encoder").is_dir():
        save_tiny_bert(beside / "encoder")
    for seed, name in enumerate(("other", "second"), start=1):
        save_tiny_reader(beside / name, beside / "encoder", seed=seed)
    (beside / "data.json").write_text(json.dumps(squad()))


def answer(model: Path, folders: Folders, backends: Sequence[Sequence[str]] = BACKENDS) -> Iterator[Command]:
    """Answer questions with a model."""
    data, other, out = folders.beside / "data.json", folders.beside / "other", folders.output
    for backend in backends:
        yield ["predict", data, "--model", model, "--out", out, "--keep-logits", *backend]
        yield ["evaluate", data, "--model", model, "--out", out, *backend]
        yield ["ensemble", model, other, "--data", data, "--out", out, *backend]
        yield partial(serve, model, *backend)
        yield partial(serve, model, other, *backend)  # which may share an encoder


def rewrite(model: Path, folders: Folders, forms: Sequence[str] = EXPORTS) -> Iterator[Command]:
    """Tune a model, and write it in other formats."""
    data, out = folders.beside / "data.json", folders.output
    for precision in ("fp32", "int8"):  # computed by torch and by onnxruntime
        yield ["calibrate", data, "--model", model, "--out", out, "--precision", precision]
    for form in forms:
        yield ["export", model, f"--{form}", out]
    yield ["export", model, "--onnx", out, "--int8", "--data", data]


def train_on(encoder: Path, folders: Folders) -> Iterator[Command]:
    """Train on an encoder, or on a model as one."""
    run = folders.output.with_name("run.toml")
    run.write_text(dump_toml(small_run(encoder)))
    yield ["train", run, "--out", folders.output]
    yield ["train", run, "--out", folders.output, "--set", "encoder.tuning=full"]
    yield ["extract", run, "--out", folders.output]


def small_run(encoder: Path, **data: str) -> dict[str, dict[str, Any]]:
    """Return the run file of one training step; `data` replaces its files."""
    files = {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 8, "max_eval_samples": 4}
    training = {"max_steps": 1, "batch_size": 4, "precision": "fp32"}
    return {
        "data": {**files, **data},
        "windows": WINDOWS,
        "encoder": {"name": str(encoder), "tuning": "frozen"},
        "training": training,
    }


def serve(*arguments: object) -> Outcome:
    """Start a server, and send it one question instead of listening; the command fails if it gets no answer."""
    from starlette.testclient import TestClient

    from lamella.serve import http_server

    def ask_once(server: http_server.Server, **_: object) -> None:
        with TestClient(server.config.app) as client:  # type: ignore[arg-type]
            response = client.post("/v1/ask", json=ASKED, headers={"Host": "localhost"})
        assert response.status_code != 500, response.text
        if response.status_code != 200:
            sys.stderr.write(f"lamella: {response.json()['error']['message']}\n")
            sys.exit(1)

    lasting = dict.fromkeys(("spare_existing_objects", "_allow_connections"), mock.DEFAULT)  # change this process
    with mock.patch.multiple(http_server, **lasting), mock.patch.object(http_server.Server, "run", ask_once):
        return run_command(["serve", *arguments, "--port", "0"])


def use_data(folders: Folders) -> Iterator[Command]:
    """Give a data file to each command that reads questions."""
    reader, out = folders.beside / "other", folders.output
    file = next(folders.inputs.iterdir(), folders.inputs / "gone.json")
    for backend in BACKENDS:
        yield ["predict", file, "--model", reader, "--out", out, "--keep-logits", *backend]
        yield ["evaluate", file, "--model", reader, "--out", out, *backend]
    yield ["predict", file, "--model", reader, "--out", out / "run", "--submission", out / "submission.csv", *ONNX]
    yield ["evaluate", file, "--model", reader, "--open", *ONNX]
    yield ["calibrate", file, "--model", reader, "--out", out]
    yield ["calibrate", file, "--model", reader, "--out", out, "--method", "features"]
    yield ["ensemble", reader, folders.beside / "second", "--data", file, "--out", out, *ONNX]
    yield ["export", reader, "--onnx", out, "--int8", "--data", file]
    run = folders.output.with_name("run.toml")
    run.write_text(dump_toml(small_run(folders.beside / "encoder")))
    for role in ("train", "dev"):
        yield ["train", run, "--out", out, "--set", f"data.{role}={json.dumps(str(file))}"]
    yield ["extract", run, "--out", out, "--set", f"data.train={json.dumps(str(file))}"]


def _models(kinds: Mapping[str, Kind]) -> Iterator[Kind]:
    def saved(folders: Folders, model: Path | None = None) -> Iterator[Command]:
        model = model or folders.inputs
        yield from answer(model, folders)
        yield from rewrite(model, folders)
        yield from train_on(model, folders)

    def tampered(folders: Folders) -> Iterator[Command]:
        for model in tampered_model(folders):
            yield from saved(folders, model)

    def encoders(folders: Folders) -> Iterator[Command]:
        reader = reader_above(folders)
        yield from answer(reader, folders)
        yield from rewrite(reader, folders)
        yield from train_on(folders.inputs, folders)

    def checkpoints(folders: Folders) -> Iterator[Command]:
        yield from answer(folders.inputs, folders)
        yield ["export", folders.inputs, "--onnx", folders.output]
        yield from train_on(folders.inputs, folders)

    def adapters(folders: Folders) -> Iterator[Command]:
        yield from answer(folders.inputs, folders)
        yield ["calibrate", folders.beside / "data.json", "--model", folders.inputs, "--dry-run"]
        yield ["export", folders.inputs, "--onnx", folders.output]
        yield from train_on(folders.inputs, folders)

    def exported(folders: Folders) -> Iterator[Command]:
        yield from answer(folders.inputs, folders, [ONNX])
        yield ["calibrate", folders.beside / "data.json", "--model", folders.inputs, "--dry-run"]

    def calibrations(folders: Folders) -> Iterator[Command]:
        reader = calibrated_reader(folders)
        yield from answer(reader, folders)
        yield from rewrite(reader, folders)

    yield through(kinds["saved models"], saved)
    yield through(kinds["tampered models"], tampered)
    yield through(kinds["encoders"], encoders)
    yield through(kinds["checkpoints"], checkpoints)
    yield through(kinds["peft folders"], adapters)
    yield through(kinds["exported models"], exported)
    yield through(kinds["calibrations"], calibrations)


def _run_files(kind: Kind) -> Kind:
    """Return complete run files of one training step, which are damaged and then run."""

    def sound(folder: Path, beside: Path) -> None:
        _add_sound_files(beside)
        table = RunConfig().model_dump(by_alias=True, exclude_none=True)
        for section, options in small_run(beside / "encoder").items():
            table[section] |= options
        (folder / "run.toml").write_text(dump_toml(table))

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file("run.toml", files["run.toml"], structure="text")
        for name, changed in broken_toml(tomllib.loads(files["run.toml"].decode())):
            yield Damage(f"run.toml: {name}", "run.toml", changed)

    def commands(folders: Folders) -> Iterator[Command]:
        run, out = folders.inputs / "run.toml", folders.output
        once = ("--set", "training.max_steps=1")  # a damaged number of steps may be a valid one of many days
        yield ["train", run, "--out", out, *once]
        yield ["extract", run, "--out", out]
        yield ["sweep", run, "--out", out, *once]
        yield ["check", run]

    return replace(through(kind, commands), sound=sound, damages=damages, reports=True)


PLUGIN = '''
"""Parts of another package."""

from lamella.registry import register


@register("metric", "{name}")
def {name}(gold, predicted, language, *, least: float = 0.5):
    """Whether an answer is right.

    `least` is the smallest score.
    """
    return gold == predicted
'''


def _plugins() -> Kind:
    """Return modules that register a part, which `parts` and run files import."""

    def sound(folder: Path, beside: Path) -> None:
        (folder / "titan_parts.py").write_text(PLUGIN.format(name="titan"))
        (beside / "run.toml").write_text('plugins = ["titan_parts"]\n[data]\ntrain = "demo:train"\ndev = "demo:dev"\n')

    def damages(files: Files) -> Iterator[Damage]:
        code = files["titan_parts.py"]
        yield from damage_file("titan_parts.py", code, structure="text")
        for old, new in (
            ("titan", "exact"),
            ("metric", "titan"),
            ("0.5", "object()"),
            (": float", ": 1 / 0"),
            (": float", ": 'X'"),
        ):
            changed = code.decode().replace(old, new).encode()
            yield Damage(f"titan_parts.py: {new} instead of {old}", "titan_parts.py", changed)
        for name, line in {"an exit": "raise SystemExit(3)", "an endless recursion": "def f(): f()\nf()"}.items():
            yield Damage(f"titan_parts.py: {name}", "titan_parts.py", code + f"\n{line}\n".encode())

    def commands(folders: Folders) -> Iterator[Command]:
        for arguments in (
            ["parts"],
            ["parts", "metric", "--json"],
            ["sweep", folders.beside / "run.toml", "--out", folders.output, "--list"],
        ):
            yield partial(_with_plugin, folders.inputs, arguments)

    return Kind("plugins", sound, damages, commands)


def _with_plugin(folder: Path, arguments: Sequence[object]) -> Outcome:
    """Run a command with a plugin that is forgotten afterwards."""
    with contextlib.ExitStack() as undone:
        undone.enter_context(mock.patch.dict(os.environ, {plugins.TRUSTED: "titan_parts"}))
        undone.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
        undone.enter_context(mock.patch.object(sys, "dont_write_bytecode", True))
        undone.enter_context(mock.patch.object(plugins, "_imported", set()))
        for family in registry.FAMILIES:
            registry.names(family)
        parts = {name: replace(family, parts=dict(family.parts)) for name, family in registry.FAMILIES.items()}
        undone.enter_context(mock.patch.dict(registry.FAMILIES, parts))
        undone.callback(sys.modules.pop, "titan_parts", None)
        importlib.invalidate_caches()
        return run_command(arguments)


def command_kinds(kinds: Mapping[str, Kind]) -> Iterator[Kind]:
    """Yield kinds of other commands; `kinds` are those whose inputs they try again."""
    yield from _models(kinds)
    yield through(kinds["squad"], use_data)
    for name in ("several", "csv", "jsonl", "parquet", "gzip"):  # which differ where they are read
        yield through(kinds[name], use_data, sampled=0)
    yield _run_files(kinds["run files"])
    yield _plugins()
