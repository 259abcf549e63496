"""Files and folders are replaced in one step, by one process at a time; what a killed process left is removed."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from lamella import atomic
from lamella.atomic import TEMPORARY, exchange, lock, temporary_folder
from lamella.errors import OutputError, RunError
from lamella.files import check_output_folder, new_folder, write_text


class Killed(BaseException):
    """Simulates a kill: the process does nothing after it."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def folder_with(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "file.txt").write_text(text)
    return path


@pytest.mark.skipif(sys.platform not in atomic.EXCHANGE, reason="this system cannot exchange folders")
def test_folders_are_exchanged_in_one_step(tmp_path: Path) -> None:
    first, second = folder_with(tmp_path / "a", "first"), folder_with(tmp_path / "b", "second")
    assert exchange(first, second)
    assert (first / "file.txt").read_text() == "second"
    assert (second / "file.txt").read_text() == "first"
    with pytest.raises(FileNotFoundError):
        exchange(first, tmp_path / "missing")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_never_missing_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """Where two renames are needed, a kill between them is undone by the next write."""
    folder = folder_with(tmp_path / "model", "old")
    if not can_exchange:
        monkeypatch.setattr(atomic, "exchange", lambda first, second: False)
    with new_folder(folder) as fresh:
        (fresh / "file.txt").write_text("new")
        assert (folder / "file.txt").read_text() == "old"
    assert (folder / "file.txt").read_text() == "new"
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("next_write", [new_folder, check_output_folder])
def test_a_kill_between_two_renames_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_write: object
) -> None:
    folder, rename = folder_with(tmp_path / "model", "old"), os.rename

    def second_kills(source: Path, target: Path) -> None:
        if target == folder:
            raise Killed
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "exchange", lambda first, second: False)
        patch.setattr(os, "rename", second_kills)
        patch.setattr("shutil.rmtree", lambda *arguments, **options: None)
        with pytest.raises(Killed), new_folder(folder) as fresh:
            (fresh / "file.txt").write_text("new")
    assert names(tmp_path) == [f".model{TEMPORARY}"]
    if next_write is check_output_folder:
        with pytest.raises(OutputError, match="exists already and is not an empty folder"):
            check_output_folder(folder)
    else:
        with pytest.raises(Killed), new_folder(folder):
            raise Killed
    assert (folder / "file.txt").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_the_second_process_that_writes_a_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with new_folder(folder, replace=False) as fresh:
        (fresh / "file.txt").write_text("first")
        message = f"{folder}: another process is writing here; wait for it, or choose another folder."
        with pytest.raises(RunError) as refused, new_folder(folder):
            pass
        assert str(refused.value) == message
        assert fresh.is_dir()
    with pytest.raises(OutputError, match="exists already"), new_folder(folder, replace=False):
        pass
    assert (folder / "file.txt").read_text() == "first"
    assert names(tmp_path) == ["out"]


def test_what_was_abandoned_is_removed_and_what_is_being_written_stays(tmp_path: Path) -> None:
    left = [tmp_path / f".results.json.1{TEMPORARY}", tmp_path / f".results.json.2{TEMPORARY}"]
    left[0].touch()
    folder_with(left[1], "a part")
    other, live = tmp_path / f".other.json.1{TEMPORARY}", tmp_path / f".results.json.3{TEMPORARY}"
    other.touch()
    live.touch()
    with lock(live):
        write_text(tmp_path / "results.json", "{}")
    assert names(tmp_path) == sorted([other.name, live.name, "results.json"])
    with temporary_folder(tmp_path / "results.json"):
        assert not live.exists()


def test_a_name_that_another_process_took_for_abandoned_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may look between the moment a file is made and the moment it is locked."""
    make_file, made = atomic._make_file, []

    def make_and_lose(path: Path, *, mode: int) -> None:
        make_file(path, mode=mode)
        made.append(path)
        if len(made) == 1:
            path.unlink()

    monkeypatch.setattr(atomic, "_make_file", make_and_lose)
    write_text(tmp_path / "file.txt", "text")
    assert len(made) == 2
    assert names(tmp_path) == ["file.txt"]


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(handle: int, operation: int) -> None:
        raise OSError(atomic.UNSUPPORTED[-1], "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    abandoned = tmp_path / f".file.txt.1{TEMPORARY}"
    abandoned.touch()
    write_text(tmp_path / "file.txt", "text")
    with new_folder(tmp_path / "folder") as fresh:
        (fresh / "file.txt").write_text("text")
    assert names(tmp_path) == sorted([abandoned.name, "file.txt", "folder"])  # it may belong to a live process


def test_files_are_opened_for_writing_before_they_are_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS 4 maps `flock` to record locks, and an exclusive one needs a file that is open for writing."""
    fcntl = pytest.importorskip("fcntl")
    flock, locked = fcntl.flock, []

    def flock_over_nfs(handle: int, operation: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            locked.append(handle)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock_over_nfs)
    abandoned = tmp_path / f".file.txt.0{TEMPORARY}"
    abandoned.touch()
    write_text(tmp_path / "file.txt", "new")
    assert names(tmp_path) == ["file.txt"]
    assert len(locked) == 2  # what was abandoned, and the new file


def test_a_link_to_an_empty_folder_stays_and_its_target_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "disk" / "target", tmp_path / "link"
    target.mkdir(parents=True)
    link.symlink_to(target)
    check_output_folder(link)
    with new_folder(link, replace=False) as fresh:
        (fresh / "file.txt").write_text("new")
    assert link.is_symlink()
    assert names(target) == ["file.txt"]
    assert names(tmp_path / "disk") == ["target"]


def test_folders_that_cannot_be_replaced_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complete folder is renamed to the place of the empty one, which is impossible for these."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "mounted").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for folder in (Path(), tmp_path / "empty", Path("../empty")):
        with pytest.raises(OutputError, match="is the working folder and cannot be replaced; choose a folder inside"):
            check_output_folder(folder)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    with pytest.raises(OutputError, match="mounted: is a mounted disk and cannot be replaced"):
        check_output_folder(tmp_path / "mounted")
    check_output_folder(tmp_path / "mounted" / "inside")
