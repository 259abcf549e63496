"""Windows kept for the next run that asks for the same ones.

    features/<sha256>.safetensors   the arrays of all windows of a data set

The name is a hash of everything that the windows depend on, so that a file is right or is not found: nothing is ever
out of date. Whatever is wrong with a file or with the folder, the windows are cut as if there were none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lamella.config import WindowOptions
from lamella.data import features as windows_module
from lamella.data.examples import Example
from lamella.data.feature_arrays import NAMES, from_arrays, text_places, to_arrays
from lamella.data.features import Features, featurise, pair_template
from lamella.data.tokens import Tokenizing, without_truncation
from lamella.errors import RunError
from lamella.files import TEMPORARY, write_bytes
from lamella.progress import progress

FORMAT = 1  # of the files
VARIABLE = "LAMELLA_CACHE"
FEWEST = 5_000  # questions; the windows of fewer are cut before one would notice
LARGEST = 4 * 2**30  # bytes of all files together
ABANDONED = 24 * 3600  # seconds after which a half-written file is nobody's any more
LOST = "lost_answers"
ENDING = ".safetensors"

Say = Callable[[str], None]


def cached_features(
    examples: Sequence[Example],
    tokenizer: Tokenizing,
    windows: WindowOptions,
    *,
    negative_windows: Literal["keep", "drop", "subsample"] = "keep",
    seed: int = 0,
    say: Say = lambda line: None,
) -> Features:
    """What `featurise` gives: read from the cache where it is there, else cut, and kept there."""
    folder = cache_folder() if len(examples) >= FEWEST else None
    if folder is None:
        return featurise(examples, tokenizer, windows, negative_windows=negative_windows, seed=seed)
    with progress("looking for windows cut before", None):
        key = _key(examples, tokenizer, windows, negative_windows, seed)
        path = folder / f"{key}{ENDING}"
        arrays = _read(path, key)
    if arrays is not None:
        features = from_arrays(
            arrays,
            examples,
            template=pair_template(tokenizer),
            max_seq_length=windows.max_seq_length,
            lost_answers=int(arrays[LOST]),
        )
        say(f"{len(features)} windows of {len(examples)} questions were cut before: read from {path}")
        return features
    features = featurise(examples, tokenizer, windows, negative_windows=negative_windows, seed=seed)
    if _write(path, key, to_arrays(features) | {LOST: np.array(features.lost_answers)}):
        say(f"{len(features)} windows of {len(examples)} questions are kept for other runs in {path}")
    return features


def cache_folder() -> Path | None:
    """Where windows are kept: in `$LAMELLA_CACHE`, else in the user's cache folder; None where it is set to nothing."""
    own = os.environ.get(VARIABLE)
    if own == "":
        return None
    if own is not None:
        return Path(os.path.expanduser(own)) / "features"
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # which its specification says to ignore
        root = os.path.expanduser("~/.cache")
    return Path(root) / "lamella" / "features" if os.path.isabs(root) else None  # a user may have no home


def _key(
    examples: Sequence[Example], tokenizer: Tokenizing, windows: WindowOptions, negative_windows: str, seed: int
) -> str:
    """A hash of all that windows depend on. A text that many questions ask about is read once."""
    answers = [answer for example in examples for answer in example.answers]
    parts: list[Any] = [
        {
            "formats": [FORMAT, windows_module.FORMAT],
            "libraries": [tokenizers.__version__, np.__version__, unicodedata.unidata_version],
            "special": [tokenizer.cls_token_id, tokenizer.pad_token_id],
            "windows": windows.model_dump(mode="json"),
            "negative_windows": negative_windows,
            "seed": seed if negative_windows == "subsample" else None,  # else nothing is drawn: runs of all seeds share
        },
        without_truncation(tokenizer).to_str(),
        list(dict.fromkeys(example.context.text for example in examples)),
        text_places(examples),
        [example.question for example in examples],
        [example.id for example in examples],
        [len(example.answers) for example in examples],
        [answer.begin_char for answer in answers],
        [answer.text for answer in answers],
    ]
    digest = hashlib.sha256()
    for part in parts:
        # As JSON each part ends where it ends, and half a surrogate pair, which UTF-8 does not know, has a form.
        digest.update(json.dumps(part, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _read(path: Path, key: str) -> dict[str, NDArray[Any]] | None:
    """The arrays of a file; None where there is none, or one that is not as it was written for this key."""
    try:
        with cast(Any, safe_open(path, framework="numpy")) as file:
            written = (file.metadata() or {}).get("sha256")
            arrays = {name: file.get_tensor(name) for name in (*NAMES, LOST)}
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if _digest(key, arrays) != written:
        return None
    with contextlib.suppress(OSError):  # a folder that may only be read
        os.utime(path)  # the least recently used are removed first
    return arrays


def _write(path: Path, key: str, arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Whether the arrays could be kept."""
    if sum(array.nbytes for array in arrays.values()) > LARGEST:
        return False
    try:
        write_bytes(path, save(dict(arrays), metadata={"sha256": _digest(key, arrays)}))
    except RunError:  # no room, no rights
        return False
    _keep_within_bounds(path.parent)
    return True


def _digest(key: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(key.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _keep_within_bounds(folder: Path) -> None:
    """Remove the files that were not used for longest, down to `LARGEST`, and what a kill left half-written.

    Another process may do the same at the same time: what cannot be looked at or removed is passed over.
    """
    found = []
    for name in _names_in(folder):
        path = folder / name
        with contextlib.suppress(OSError):
            status = path.stat()
            if name.endswith(ENDING):
                found.append((status.st_mtime_ns, status.st_size, path))
            elif name.endswith(TEMPORARY) and status.st_mtime < time.time() - ABANDONED:
                path.unlink()
    total = 0
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > LARGEST:
            with contextlib.suppress(OSError):
                path.unlink()


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
