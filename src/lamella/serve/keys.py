"""The keys that clients must send: from a file or the environment."""

from __future__ import annotations

import os
from pathlib import Path

from lamella.errors import UnreadableError, UsageError

KEYS = "LAMELLA_API_KEYS"


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Return the keys of a file, or of the environment: separated by white space or commas."""
    if file is None:
        where, text = KEYS, os.environ.get(KEYS, "")
        if KEYS not in os.environ:
            return ()
    else:
        where = f"serve --keys {file}"
        try:
            text = file.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise UnreadableError(
                f"{where}: cannot be read ({reason}); give a text file with one key per line."
            ) from None
    keys = tuple(text.replace(",", " ").split())
    if not keys:  # not the same as no keys: everyone could ask
        raise UsageError(f"{where}: expected at least one key, found none.")
    if odd := [number for number, key in enumerate(keys, 1) if not (key.isascii() and key.isprintable())]:
        raise UsageError(f"{where}: expected keys of printable ASCII characters, key {odd[0]} has others.")
    return keys
