"""Find the files that a folder, a file name or a glob pattern stands for."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lamella.documents.file_text import kind_of_name
from lamella.errors import UsageError, one_line, printable, truncate, warn


@dataclass(frozen=True)
class FoundFiles:
    """The files of a folder, by their names in it; files that were named themselves have no folder."""

    folder: Path | None
    names: tuple[str, ...]

    def path(self, name: str) -> Path:
        """Return the path of a file."""
        return Path(name) if self.folder is None else self.folder / name


def find_files(sources: Iterable[str | os.PathLike[str]]) -> list[FoundFiles]:
    """Return the files of folders, files by themselves, and those that match glob patterns (`**` is any depth).

    A folder stands for all files of known kinds in it, at any depth; hidden files and folders are skipped, and so are
    links to folders and links out of the folder, the latter with a warning. Each file is returned once. The files that
    have no folder come last.
    """
    folders: list[str] = []
    files_named: list[str] = []
    for source in sources:
        for path in _expand(os.path.expanduser(os.fspath(source))):
            (folders if os.path.isdir(path) else files_named).append(path)
    found = [FoundFiles(Path(folder), tuple(_walk(Path(folder)))) for folder in folders]
    found += [FoundFiles(None, tuple(files_named))] if files_named else []
    seen: set[str] = set()
    kept = []
    for files in found:
        names = []
        for name in files.names:
            if (path := os.path.realpath(files.path(name))) not in seen:
                seen.add(path)
                names.append(name)
        kept.append(FoundFiles(files.folder, tuple(names)))
    return kept


def _expand(name: str) -> list[str]:
    """Return the paths that a name stands for; files of unknown kinds match no pattern."""
    if os.path.exists(name):
        return [name]
    shown = truncate(repr(name), 100)
    if not glob.has_magic(name):
        raise UsageError(f"{shown}: no such file or folder; give a folder, files, or a glob pattern.")
    matches = sorted(glob.glob(name, recursive=True))
    if "**" in name:  # the files of each folder match by themselves
        matches = [match for match in matches if not os.path.isdir(match)]
    matches = [match for match in matches if os.path.isdir(match) or kind_of_name(match) is not None]
    if not matches:
        raise UsageError(f"{shown}: no txt, md, html, pdf or docx file matches this pattern; check the path.")
    return matches


def _walk(folder: Path) -> Iterator[str]:
    """Yield the names of the files of known kinds in a folder, relative to it, in the order of their names."""

    def report(error: OSError) -> None:
        reason = one_line(error) if error.strerror is None else error.strerror
        warn(f"{printable(error.filename)}: cannot be read ({reason}).")

    root = Path(os.path.realpath(folder))

    def leads_out(path: str, kind: str) -> bool:
        if not os.path.islink(path) or root in (target := Path(os.path.realpath(path))).parents or target == root:
            return False
        warn(f"{printable(path)}: skipped: links to a {kind} outside of the folder; to read it, name it.")
        return True

    for top, folders, files in os.walk(folder, onerror=report):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:  # links to folders are not followed; within the folder, their files are read anyway
            leads_out(os.path.join(top, name), "folder")
        for name in sorted(files):
            if name.startswith(".") or kind_of_name(name) is None:
                continue
            path = os.path.join(top, name)
            if not leads_out(path, "file"):
                yield os.path.relpath(path, folder)
