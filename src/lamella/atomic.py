"""Write files and folders so that a kill at any moment leaves the old one or the new one, never a part.

What is being written has a temporary name, and is locked. The system releases the locks of a killed process, so a later
write of the same file or folder recognises what was abandoned, and removes it (docs/decisions/0056-faults.md).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ModuleNotFoundError:  # Windows: nothing is locked, and what was abandoned stays
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".lamella-part"  # suffix of what is being written
OLD = "old"  # in a workspace: the folder that is being replaced, where the system cannot exchange two folders
EXCHANGE = {"linux": "renameat2", "darwin": "renamex_np"}  # the system call by platform
AT_FDCWD, SWAP = -100, 2  # Linux: paths relative to the working folder; both systems: exchange the two
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.EBADF)  # by system or file system


@contextlib.contextmanager
def lock(path: Path, *, required: bool = False) -> Iterator[int | None]:
    """Lock a file or folder, and yield the file descriptor that holds the lock; None where there are no locks.

    Raise BlockingIOError if another process holds the lock, and FileNotFoundError if the path was removed or replaced
    in the meantime. If the file system has no locks, go on without, or raise OSError if the lock is `required`.
    """
    if fcntl is None:
        if required:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        yield None
        return
    handle = _open_to_lock(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if required or error.errno not in UNSUPPORTED:
                raise
        if not os.path.samestat(os.fstat(handle), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield handle
    finally:
        os.close(handle)


def _open_to_lock(path: Path) -> int:
    """Open a folder for reading and a file for writing: without that, NFS 4 refuses an exclusive lock (EBADF)."""
    if not path.is_dir():
        with contextlib.suppress(PermissionError):  # a file of another user
            return os.open(path, os.O_RDWR)
    return os.open(path, os.O_RDONLY)


@contextlib.contextmanager
def new_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write; it replaces `path` when the block ends, and is removed on an error.

    Only its owner can read a `private` file.
    """
    _remove_abandoned(path)
    with contextlib.ExitStack() as locks:
        name = _claim(path, partial(_make_file, mode=0o600 if private else 0o666), locks)
        try:
            with open(name, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`, to be renamed to it; it is removed when the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    with contextlib.ExitStack() as locks:
        fresh = _claim(path, Path.mkdir, locks)
        try:
            yield fresh
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


@contextlib.contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, for one process at a time; it is removed when the block ends.

    Raise BlockingIOError while another process has it.
    """
    work = _workspace_of(folder)
    with contextlib.ExitStack() as locks:
        while True:
            work.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the process that had it has just removed it
                locks.enter_context(lock(work))
                break
        try:
            _restore_old(work, folder)
            for abandoned in list(work.iterdir()):
                remove(abandoned)
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def remove_abandoned_workspace(folder: Path) -> None:
    """Remove what a killed process left beside a folder that it was writing."""
    with contextlib.suppress(OSError), lock(work := _workspace_of(folder), required=True):
        _restore_old(work, folder)
        shutil.rmtree(work, ignore_errors=True)


def _workspace_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}{TEMPORARY}"


def _restore_old(work: Path, folder: Path) -> None:
    """Undo the first of the two renames of `replace_folder` if a process was killed between them."""
    if not folder.exists() and (work / OLD).is_dir():
        os.rename(work / OLD, folder)


def replace_folder(fresh: Path, folder: Path, aside: Path) -> None:
    """Move a complete folder to the place of another, which is removed.

    The two are exchanged in one step. Where the system cannot do that, the old folder moves to `aside` first.
    """
    if not folder.exists():
        os.rename(fresh, folder)
    elif not exchange(fresh, folder):
        os.rename(folder, aside)
        os.rename(fresh, folder)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        shutil.rmtree(fresh, ignore_errors=True)  # the old one, under the other name


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders in one step; return whether this system can do it."""
    import ctypes  # here, as it is rarely needed

    call = getattr(ctypes.CDLL(None, use_errno=True), EXCHANGE.get(sys.platform, ""), None)
    if call is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    arguments = (AT_FDCWD, names[0], AT_FDCWD, names[1]) if sys.platform == "linux" else names
    if call(*arguments, SWAP) == 0:
        return True
    if (number := ctypes.get_errno()) in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(second))


def remove(path: Path) -> None:
    """Remove a file, or a folder with all it holds; a symbolic link is removed itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_file(path: Path, *, mode: int) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))


def _claim(path: Path, make: Callable[[Path], None], locks: contextlib.ExitStack) -> Path:
    """Make and lock a file or folder with a temporary name that no other process has."""
    while True:
        name = path.parent / f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}"
        make(name)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):  # another process took it for abandoned
            locks.enter_context(lock(name))
            return name


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes left under temporary names of `path`; what a live one is writing is locked."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(f".{path.name}.")]
    for name in names:
        if name.endswith(TEMPORARY):
            with contextlib.suppress(OSError), lock(path.parent / name, required=True):
                remove(path.parent / name)
