"""The commands that write files, small enough to be run hundreds of times; see `fault_trials`."""

from __future__ import annotations

import shutil
from pathlib import Path

from doubles import save_tiny_encoder
from fault_trials import Case, Files
from lamella.data.file_formats.formats import read
from lamella.data.file_formats.writers import write
from lamella.documents.index_file import INDEX, StoredIndex
from lamella.plan import make_plan
from lamella.run_file import read_table
from lamella.training.run import train_plan
from run_files import write_run_file

SCORED = 'evaluate_every = "2 steps"\nsave_at = [0.5]'
HEADS = "[grid.learner]\nseed = [0, 1]"


def cases(material: Path) -> dict[str, Case]:
    """Return the commands by name; `material` is the folder that `write_material` has written."""
    full, lora, tuning = (str(material / name) for name in ("full", "lora", "tuning.json"))

    def training(name: str) -> Case:
        command = ("train", str(material / f"{name}.toml"), "--out", "out")
        return Case(command, again=(*command, "--resume"))

    def export(form: str) -> Case:
        return Case(("export", lora, f"--{form}", "out"), replaced="out")

    def copy_reader(folder: Path) -> None:
        shutil.copytree(material / "full" / "model", folder / "out")

    def copy_documents(folder: Path) -> None:
        shutil.copytree(material / "documents", folder / "documents")

    def keep_one(folder: Path) -> None:
        (folder / "kept").mkdir()
        shutil.copy(material / "tuning.json", folder / "kept" / "lora.json")

    return {
        "train": training("full"),
        "train, several": training("heads"),
        "sweep": Case(("sweep", str(material / "sweep"), "--out", "out")),
        "extract": Case(("extract", str(material / "heads.toml"), "--out", "out")),
        **{f"export --{form}": export(form) for form in ("onnx", "half", "flatten", "as-transformers", "peft")},
        "calibrate": Case(("calibrate", tuning, "--model", "out", "--force"), prepare=copy_reader),
        "calibrate --out": Case(
            ("calibrate", tuning, "--model", lora, "--out", "out", "--overwrite"), prepare=copy_reader, replaced="out"
        ),
        "ask": Case(
            ("ask", "Which moon?", "--context", str(material / "documents" / "0.txt"), "--model", lora, "--json"),
            environment={"LAMELLA_CACHE": "cache"},
            view=graphs_of_cache,
        ),
        "index": Case(("index", "documents"), prepare=copy_documents, view=texts_of_index),
        "compare --keep": Case(
            ("compare", full, lora, "--keep", "kept", "--overwrite"), prepare=keep_one, replaced="kept/lora.json"
        ),
    }


def write_material(folder: Path) -> None:
    """Write what the commands read: an encoder, run files, two readers trained from them, data, documents."""
    encoder = f'name = "{save_tiny_encoder(folder / "tiny", num_hidden_layers=1)}"'
    write_run_file(folder / "full.toml", encoder, training=SCORED)
    write_run_file(folder / "lora.toml", f'{encoder}\ntuning = "lora"', steps=2)
    write_run_file(folder / "heads.toml", f'{encoder}\ntuning = "frozen"', HEADS, training=SCORED)
    (folder / "sweep").mkdir()
    write_run_file(folder / "sweep" / "first.toml", encoder, steps=2)
    write_run_file(folder / "sweep" / "heads.toml", 'from = "first"\ntuning = "frozen"', HEADS, steps=2)
    for name in ("full", "lora"):
        train_plan(make_plan(read_table(folder / f"{name}.toml"), where="test"), folder / name)
    write(read("demo:dev").examples[:60], folder / "tuning.json")
    documents = folder / "documents"
    documents.mkdir()
    for number in range(3):
        (documents / f"{number}.txt").write_text(f"Titan {number} is a moon of Saturn. " * 20)


def texts_of_index(folder: Path) -> Files:
    """The documents of an index and their texts; the times of the files, which it also holds, differ each time."""
    index = StoredIndex(folder / "documents" / INDEX)
    return {record.name: index.text(number).encode() for number, record in enumerate(index.records)}


def graphs_of_cache(folder: Path) -> Files:
    """The graphs that loading a reader leaves in the cache; other files there hold times."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.onnx")}
