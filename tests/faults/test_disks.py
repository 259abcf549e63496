"""A full disk, a read-only disk or a vanished cache is one line; finished work stays, and the rest can be repeated."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fault_cases import cases
from fault_trials import Trial
from forks import ForkServer
from kills import changes, prelude
from lamella import runs
from outcomes import outcome

slow = pytest.mark.slow
AMPLE = 256 * 2**20
PAGE = 4096  # the smallest disk
WRITERS = [name for name in cases(Path()) if name != "ask"]  # answering goes on without its cache
QUICK = ("calibrate --out",)
NO_SPACE = re.compile(r"No space left on device|free disk space|is the disk full")


@dataclass(frozen=True)
class Disk:
    """A file system in memory, mounted at a folder."""

    folder: Path

    def resize(self, size: int) -> None:
        self._remount(f"size={size}")

    def read_only(self) -> None:
        self._remount("ro")

    def writable(self) -> None:
        self._remount("rw")

    def used(self) -> int:
        status = os.statvfs(self.folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def _remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", self.folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", f"size={AMPLE}", "lamella-tests", folder]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs the rights of root")
    yield Disk(folder)
    subprocess.run(["umount", "--lazy", folder], check=True)


def marked(names: list[str]) -> list[object]:
    return [name if name in QUICK else pytest.param(name, marks=slow) for name in names]


@pytest.mark.parametrize("name", marked(WRITERS))
def test_a_disk_that_becomes_full(name: str, disk: Disk, material: Path, forks: ForkServer) -> None:
    trial = Trial(cases(material)[name], disk.folder, forks)
    written = disk.used()
    trial.prepare()
    given = disk.used()
    errors = []
    for share in (0, 0.5, 0.9) if name not in QUICK else (0.5,):
        size = max(PAGE, given + int(share * (written - given if written > given else written)))
        errors.append(trial.fail(lambda size=size: disk.resize(size), lambda: disk.resize(AMPLE)))
    assert trial.tally.losses == []
    assert NO_SPACE.search(errors[0]), errors
    assert all(NO_SPACE.search(error) for error in errors if error), errors


@pytest.mark.parametrize("name", marked(WRITERS))
def test_a_read_only_disk(name: str, disk: Disk, material: Path, forks: ForkServer) -> None:
    trial = Trial(cases(material)[name], disk.folder, forks)
    error = trial.fail(disk.read_only, disk.writable)
    assert trial.tally.losses == []
    assert "Read-only file system" in error or "cannot be written" in error


@pytest.mark.slow
def test_answers_need_no_disk(disk: Disk, material: Path, forks: ForkServer) -> None:
    trial = Trial(cases(material)["ask"], disk.folder, forks)
    assert trial.fail(lambda: disk.resize(PAGE), lambda: disk.resize(AMPLE)) == ""
    assert trial.fail(disk.read_only, disk.writable) == ""


def test_a_cache_that_vanishes_during_training(material: Path, tmp_path: Path, forks: ForkServer) -> None:
    """The run goes on with what it has opened, or it stops in one line and resumes once the cache is there again."""
    run_file, cache, out, counter = material / "heads.toml", tmp_path / "cache", tmp_path / "out", tmp_path / "count"
    command = ("train", run_file, "--cache", cache, "--out", out)
    assert forks.run("extract", run_file, "--out", cache)[0] == 0
    code, _, err = forks.run(*command, prelude=prelude(out, counter))
    assert code == 0, err
    whole = outcome(out)
    for share in (0.1, 0.5):
        shutil.rmtree(out)
        point = max(1, int(share * changes(counter)))
        code, _, err = forks.run(*command, prelude=prelude(out, tmp_path / "other", last=point, removed=cache))
        assert not cache.exists()
        assert forks.run("extract", run_file, "--out", cache)[0] == 0
        if code:
            assert (code, err.count("\n")) == (1, 1), err
            assert str(cache) in err
            assert runs.run_state(out) == "failed"
            code, _, err = forks.run(*command, "--resume")
        assert code == 0, err
        assert outcome(out) == whole


def test_a_cache_that_is_gone_before_training(material: Path, tmp_path: Path, forks: ForkServer) -> None:
    out = tmp_path / "out"
    code, _, err = forks.run("train", material / "heads.toml", "--cache", tmp_path / "gone", "--out", out)
    assert (code in (1, 2), err.count("\n")) == (True, 1), err
    assert str(tmp_path / "gone") in err
    assert not out.exists()
