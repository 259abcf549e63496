"""Cache windows on disk for later runs that need the same ones.

    features/<sha256>.safetensors   the arrays of all windows of a data set

The name is a hash of everything that the windows depend on, so a file is either right or not found: it is never out of
date. If a file or the folder is unusable, the windows are cut as if there were no cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lamella.config import WindowOptions
from lamella.data.examples import Example
from lamella.data.windows import features as windows_module
from lamella.data.windows.feature_arrays import NAMES, context_indices, from_arrays, to_arrays
from lamella.data.windows.features import Features, featurise, pair_template
from lamella.data.windows.tokens import Tokenizing, without_truncation
from lamella.errors import RunError, counted
from lamella.files import write_bytes
from lamella.progress import Log, progress
from lamella.user_cache import cache_folder, limit_size

FORMAT = 2  # version of the file format, and of how texts are tokenised
CONTENT = "features"  # the folder in the user's cache
MIN_QUESTIONS = 5_000  # the windows of fewer questions are cut fast enough
MAX_BYTES = 4 * 2**30  # of all files together
LOST = "lost_answers"
ENDING = ".safetensors"


def cached_features(
    examples: Sequence[Example],
    tokenizer: Tokenizing,
    windows: WindowOptions,
    *,
    negative_windows: Literal["keep", "drop", "subsample"] = "keep",
    seed: int = 0,
    log: Log = lambda line: None,
) -> Features:
    """Return the windows of `featurise`: read from the cache if they are in it, else cut and cached."""
    folder = cache_folder(CONTENT) if len(examples) >= MIN_QUESTIONS else None
    if folder is None:
        return featurise(examples, tokenizer, windows, negative_windows=negative_windows, seed=seed)
    with progress("looking for cached windows", None):
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
        log(f"read {counted(len(features), 'cached window')} of {counted(len(examples), 'question')} from {path}")
        return features
    features = featurise(examples, tokenizer, windows, negative_windows=negative_windows, seed=seed)
    if _write(path, key, to_arrays(features) | {LOST: np.array(features.lost_answers)}):
        content = f"{counted(len(features), 'window')} of {counted(len(examples), 'question')}"
        log(f"cached {content} for later runs in {path}")
    return features


def _key(
    examples: Sequence[Example], tokenizer: Tokenizing, windows: WindowOptions, negative_windows: str, seed: int
) -> str:
    """Hash everything that windows depend on; each distinct context is hashed once."""
    answers = [answer for example in examples for answer in example.answers]
    parts: list[Any] = [
        {
            "formats": [FORMAT, windows_module.FORMAT],
            "libraries": [tokenizers.__version__, np.__version__, unicodedata.unidata_version],
            "special": [tokenizer.cls_token_id, tokenizer.pad_token_id],
            "windows": windows.model_dump(mode="json"),
            "negative_windows": negative_windows,
            "seed": seed if negative_windows == "subsample" else None,  # otherwise runs of all seeds share the windows
        },
        without_truncation(tokenizer).to_str(),
        list(dict.fromkeys(example.context.text for example in examples)),
        context_indices(examples),
        [example.question for example in examples],
        [example.id for example in examples],
        [len(example.answers) for example in examples],
        [answer.begin_char for answer in answers],
        [answer.text for answer in answers],
    ]
    digest = hashlib.sha256()
    for part in parts:
        # JSON delimits each part, and can represent a lone surrogate, which UTF-8 cannot.
        digest.update(json.dumps(part, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _read(path: Path, key: str) -> dict[str, NDArray[Any]] | None:
    """Read the arrays of a file; None if it is missing or was not written for this key."""
    try:
        with cast(Any, safe_open(path, framework="numpy")) as file:
            written = (file.metadata() or {}).get("sha256")
            arrays = {name: file.get_tensor(name) for name in (*NAMES, LOST)}
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if _digest(key, arrays) != written:
        return None
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(path)  # the least recently used files are removed first
    return arrays


def _write(path: Path, key: str, arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Write the arrays; return whether that succeeded."""
    if sum(array.nbytes for array in arrays.values()) > MAX_BYTES:
        return False
    try:
        write_bytes(path, save(dict(arrays), metadata={"sha256": _digest(key, arrays)}))
    except RunError:  # no space or no permission
        return False
    limit_size(path.parent, MAX_BYTES, ending=ENDING)
    return True


def _digest(key: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(key.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()
