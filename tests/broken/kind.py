"""A kind of input: the sound files, what is damaged in them, and the commands that read them."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from broken.container_damage import broken_safetensors, broken_zip
from broken.damage import Damage, broken_bytes, broken_places, broken_text, write_content
from broken.json_damage import broken_json
from broken.oracle import Outcome, find_fault, run_command

Files = Mapping[str, bytes]
Item = TypeVar("Item")
STRUCTURES = {".json": "json", ".safetensors": "safetensors"}


@dataclass(frozen=True)
class Folders:
    """Where a command finds a broken input and the sound files beside it, and where it may write."""

    inputs: Path
    beside: Path
    output: Path


@dataclass(frozen=True)
class Kind:
    """Inputs of one kind.

    `sound` writes the files that are damaged, one at a time, into its first folder, and others that the commands read
    into its second one. `commands` returns calls of the command line, or functions that are called instead.
    """

    name: str
    sound: Callable[[Path, Path], None]
    damages: Callable[[Files], Iterator[Damage]]
    commands: Callable[[Folders], Iterator[Sequence[object] | Callable[[], Outcome]]]
    reports: bool = False  # whether problems are listed on standard output
    refuses: bool = True  # False if a file that cannot be read is skipped, with a note
    needs: Sequence[str] = ()  # libraries beside those of every installation
    again: bool = False  # whether another kind tries the same inputs with other commands
    each: int | None = None  # commands that read a damaged input, chosen by its name; None: all of them
    sampled: int = 10  # inputs that the normal tests try; `make test-slow` tries all of them


class Bench:
    """Tries the inputs of a kind, in a folder of its own."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        sound, self.beside = folder / "sound", folder / "beside"
        sound.mkdir(parents=True)
        self.beside.mkdir()
        kind.sound(sound, self.beside)
        paths = [path for path in sorted(sound.rglob("*")) if path.is_file()]
        self.files: Files = {str(path.relative_to(sound)): path.read_bytes() for path in paths}
        self.damages = list(kind.damages(self.files))

    def attempt(self, damage: Damage | None, *, each: int | None = None) -> Iterator[tuple[Outcome, str]]:
        """Write an input into an empty folder and run the commands; yield each outcome and its fault.

        `each` limits the number of commands; by default, sound files go through all of them.
        """
        folder = self.folder / "tried"
        shutil.rmtree(folder, ignore_errors=True)
        inputs = folder / "in"
        inputs.mkdir(parents=True)
        for name, content in self.files.items():
            write_content(inputs / name, damage.content if damage and name == damage.file else content)
        before = _sizes(inputs)
        output = folder / "out"
        commands = self.kind.commands(Folders(inputs, self.beside, output))
        each = self.kind.each if each is None and damage is not None else each
        if each is not None:
            commands = iter(sample(list(commands), each, damage.name if damage else self.kind.name))
        for command in commands:
            outcome = command() if callable(command) else run_command(command)
            fault = find_fault(outcome, written=output, reports=self.kind.reports)
            if not fault and _sizes(inputs) != before:
                fault = f"changed {', '.join(sorted(_sizes(inputs).items() ^ before.items()))}"
            yield outcome, fault
            shutil.rmtree(output, ignore_errors=True)
            output.unlink(missing_ok=True)


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def sample(items: Sequence[Item], count: int, seed: str) -> list[Item]:
    """Return some of the items: the same ones in every run."""
    choose = random.Random(zlib.crc32(seed.encode("utf-8", "surrogatepass")))
    return choose.sample(items, min(count, len(items)))


def damage_file(file: str, data: bytes, *, structure: str = "") -> Iterator[Damage]:
    """Yield all damages to a file; `structure` names what it holds: json, safetensors, zip, text."""
    for place, content in broken_places():
        yield Damage(f"{file}: {place}", file, content)
    for name, changed in broken_bytes(data):
        yield Damage(f"{file}: {name}", file, changed)
    structures: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
        "json": lambda: broken_json(json.loads(data)),
        "safetensors": lambda: broken_safetensors(data),
        "zip": lambda: broken_zip(data),
        "text": lambda: broken_text(data.decode()),
    }
    if structure:
        for name, changed in structures[structure]():
            yield Damage(f"{file}: {name}", file, changed)


def damage_all(files: Files) -> Iterator[Damage]:
    """Yield all damages to all files."""
    for file, data in files.items():
        yield from damage_file(file, data, structure=STRUCTURES.get(Path(file).suffix, ""))
