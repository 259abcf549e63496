"""Run folders: atomic files, correct states, and no file of the user is touched."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamella import environment, runs
from lamella.atomic import TEMPORARY
from lamella.errors import RunError, UnreadableError
from lamella.files import append_json_line, new_folder, read_json, write_entries, write_json, write_text


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    write_json(file, {"f1": 80})

    def power_cut(handle: int) -> None:
        assert len(names(tmp_path)) == 2  # the new bytes are on the disk, beside the old file
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(KeyboardInterrupt):
        write_json(file, {"f1": 90})
    assert names(tmp_path) == {"results.json"}
    assert read_json(file) == {"f1": 80}


def test_a_full_disk_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"results\.json: cannot be written \(No space left on device\)\.$"):
        write_json(tmp_path / "results.json", {})
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"q1": [{"text": 'a "quote"\nand a line', "score": 1e-9}], 'q"2': []},
        {"é": "\ud800 half a pair", "x": None},
    ],
)
def test_entries_are_the_same_json_on_lines(entries: dict[str, Any], tmp_path: Path) -> None:
    write_entries(tmp_path / "lines.json", entries)
    write_json(tmp_path / "indented.json", entries)
    assert read_json(tmp_path / "lines.json") == read_json(tmp_path / "indented.json") == entries
    assert len((tmp_path / "lines.json").read_text().splitlines()) == (len(entries) + 2 if entries else 1)


def test_a_value_that_json_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write_json(file, {"f1": 80})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(file, {"f1": math.nan})
    assert read_json(file) == {"f1": 80}
    assert names(tmp_path) == {"results.json"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_that_the_user_s_mask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "deep" / "file.txt", "text")
        with new_folder(tmp_path / "folder") as folder:
            (folder / "within").mkdir()
            for path in (folder / "private.txt", folder / "within" / "private.txt"):
                path.touch(mode=0o600)  # as some libraries write their files
        assert os.umask(umask) == umask  # looking the mask up did not change it
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_dir()} == {0o777 & ~umask}


def test_any_text_survives_writing_and_reading(tmp_path: Path) -> None:
    value = {"text": "naïve 서울 👩\u200d🚀 \x00 \u2028", "half a pair": "\ud83d!", "list": [1, 2.5, None, True]}
    write_json(tmp_path / "value.json", value)
    assert read_json(tmp_path / "value.json") == value
    assert "서울" in (tmp_path / "value.json").read_text(encoding="utf-8")
    append_json_line(tmp_path / "many.jsonl", value)
    append_json_line(tmp_path / "many.jsonl", value)
    lines = (tmp_path / "many.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines if line] == [value, value]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1,\n "b" 2}', r"file\.json:2:6: broken JSON: Expecting ':' delimiter\.$"),
        (b"", r"file\.json: the file is empty\.$"),
        (
            b'{"a": "\xff"}',
            r"file\.json: expected UTF-8 text, got byte 0xff at position 7 .*; save it as UTF-8\.$",
        ),
        (None, r"file\.json: no such file\.$"),
    ],
)
def test_reading_a_broken_file_reports_the_position(tmp_path: Path, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(UnreadableError, match=expected):
        read_json(tmp_path / "file.json")


def test_reading_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"cannot be read \(Is a directory\)\.$"):
        read_json(tmp_path)


def test_a_run_is_unfinished_until_it_is_finished(tmp_path: Path) -> None:
    with runs.new_run(tmp_path / "deep" / "run", "train") as folder:
        assert folder == tmp_path / "deep" / "run"
        assert runs.run_state(folder) == "unfinished"
        assert "ended" not in read_json(folder / runs.RUN)
    record = read_json(folder / runs.RUN)
    assert record["state"] == runs.run_state(folder) == "finished"
    assert record["command"] == "train"
    assert record["started"] <= record["ended"]
    assert names(folder) == {runs.RUN, runs.ENVIRONMENT}


def test_a_failed_run_records_the_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="diverged"), runs.new_run(tmp_path / "run", "train"):
        raise RunError("the loss has diverged \ud83d")
    record = read_json(tmp_path / "run" / runs.RUN)
    assert (record["state"], record["error"]) == ("failed", "the loss has diverged \ud83d")
    assert "ended" in record


def test_an_interrupted_run_is_marked(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), runs.new_run(tmp_path / "run", "train"):
        raise KeyboardInterrupt
    assert runs.run_state(tmp_path / "run") == "interrupted"


def test_a_full_disk_does_not_hide_the_error_that_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    def train() -> None:
        with runs.new_run(tmp_path / "run", "train"):
            monkeypatch.setattr(os, "fsync", full)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert runs.run_state(tmp_path / "run") == "unfinished"


KILLED = """
import os, signal, sys
from pathlib import Path
from lamella import runs
from lamella.files import write_json

with runs.new_run(Path(sys.argv[1]), "train", overwrite=True) as folder:
    write_json(folder / runs.RESULTS, {"f1": 80})
    os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    write_json(folder / runs.RESULTS, {"f1": 90})
"""


def test_a_killed_run_is_marked_unfinished_and_can_be_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", KILLED, folder], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert runs.run_state(folder) == "unfinished"
    assert read_json(folder / runs.RESULTS) == {"f1": 80}  # the kill came in the middle of writing the next
    (left,) = names(folder) - {runs.RUN, runs.ENVIRONMENT, runs.RESULTS}
    assert left.endswith(TEMPORARY)
    with pytest.raises(RunError, match=r"already holds a run \(unfinished\)"), runs.new_run(folder, "train"):
        pass
    with runs.new_run(folder, "train", overwrite=True):
        assert names(folder) == {runs.RUN, runs.ENVIRONMENT}


def test_a_run_killed_before_its_first_file_was_complete_does_not_occupy_the_folder(tmp_path: Path) -> None:
    (tmp_path / f".{runs.RUN}.x8d2{TEMPORARY}").touch()
    with runs.new_run(tmp_path, "train"):
        assert names(tmp_path) == {runs.RUN, runs.ENVIRONMENT}


def test_a_kill_while_the_earlier_run_is_removed_leaves_no_finished_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runs.new_run(tmp_path, "train"):
        write_json(tmp_path / runs.RESULTS, {"f1": 80})

    def kill(path: Path, missing_ok: bool = False) -> None:
        raise SystemExit

    monkeypatch.setattr(Path, "unlink", kill)
    with pytest.raises(SystemExit), runs.new_run(tmp_path, "train", overwrite=True):
        pass
    assert runs.run_state(tmp_path) == "unfinished"


def test_an_occupied_folder_is_refused_with_and_without_overwrite(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    (tmp_path / runs.RESULTS).write_text("someone else's results")
    for overwrite in (False, True):
        with (
            pytest.raises(RunError, match="is not empty and not a run folder"),
            runs.new_run(tmp_path, "train", overwrite=overwrite),
        ):
            pass
    assert names(tmp_path) == {"thesis.tex", runs.RESULTS}
    assert (tmp_path / runs.RESULTS).read_text() == "someone else's results"


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    with runs.new_run(tmp_path, "train"):
        pass
    assert runs.run_state(tmp_path) == "finished"


@pytest.mark.parametrize(
    ("command", "advice"), [("train", ", or --resume to continue the training."), ("predict", ".")]
)
def test_only_a_training_can_be_resumed(command: str, advice: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), runs.new_run(tmp_path / "run", command):
        raise KeyboardInterrupt
    with pytest.raises(RunError) as caught, runs.new_run(tmp_path / "run", command):
        pass
    assert str(caught.value).endswith(
        f"already holds a run (interrupted); choose another --out, or pass --overwrite{advice}"
    )


def test_an_earlier_run_is_refused_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    with runs.new_run(tmp_path, "train") as folder:
        for name in (*runs.FILES[1:], "model/config.json", "model/extra/file"):
            write_text(folder / name, "ours")
    (folder / "notes.md").write_text("mine")
    (folder / "plots").mkdir()
    (folder / "plots" / "config.json").write_text("mine")
    before = (folder / runs.RUN).read_bytes()
    with pytest.raises(RunError, match=r"already holds a run \(finished\); .* or pass --overwrite\.$"):
        runs.new_run(folder, "train").__enter__()
    assert (folder / runs.RUN).read_bytes() == before
    with runs.new_run(folder, "predict", overwrite=True):
        assert names(folder) == {runs.RUN, runs.ENVIRONMENT, "notes.md", "plots"}
        assert runs.run_state(folder) == "unfinished"
    assert (folder / "plots" / "config.json").read_text() == "mine"
    assert read_json(folder / runs.RUN)["command"] == "predict"


def test_overwriting_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    write_text(shared / "model.safetensors", "precious")
    with runs.new_run(tmp_path / "run", "train") as folder:
        (folder / runs.MODEL).symlink_to(shared)
    with runs.new_run(folder, "train", overwrite=True):
        assert not (folder / runs.MODEL).exists()
    assert (shared / "model.safetensors").read_text() == "precious"


def test_a_path_that_cannot_be_a_folder_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file: expected a folder to write the run into \(Not a directory\)\.$"):
        runs.new_run(tmp_path / "file", "train").__enter__()
    with pytest.raises(RunError, match=r"Not a directory") as caught:
        runs.new_run(tmp_path / "file" / "run", "train").__enter__()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "{}", '{"state": 3}', "{"])
def test_a_damaged_record_is_an_error_and_nothing_is_removed(tmp_path: Path, content: str) -> None:
    (tmp_path / runs.RUN).write_text(content)
    (tmp_path / runs.RESULTS).write_text("{}")
    with pytest.raises(UnreadableError, match=r"run\.json"):
        runs.new_run(tmp_path, "train", overwrite=True).__enter__()
    assert names(tmp_path) == {runs.RUN, runs.RESULTS}


def test_a_folder_without_a_run_has_no_state(tmp_path: Path) -> None:
    assert runs.run_state(tmp_path) is None
    assert runs.run_state(tmp_path / "absent") is None


def test_the_environment_records_what_a_result_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lamella", "train", "run.toml"])
    record = json.loads(json.dumps(environment.environment()))
    assert record["arguments"] == ["train", "run.toml"]
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    installed = {name for name in environment.LIBRARIES if importlib.util.find_spec(name)}
    assert {"tokenizers", "numpy"} <= set(record["libraries"]) == installed
    assert all(version[0].isdigit() for version in record["libraries"].values())
    assert {"lamella", "platform", "processor", "cores"} <= set(record)


def test_library_versions_leave_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LIBRARIES", ("numpy", "no-such-library"))
    assert list(environment.library_versions()) == ["numpy"]
