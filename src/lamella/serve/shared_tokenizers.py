"""One tokenizer for all readers that have equal ones, with a cache of the tokens of contexts."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from weakref import WeakValueDictionary

from lamella.data.windows.context_cache import ContextCache
from lamella.data.windows.tokens import Tokenizing, remember_contexts


class SharedTokenizers:
    """The tokenizers of the readers in memory. Threads may share it."""

    def __init__(self, cache_bytes: int) -> None:
        self.cache = ContextCache(cache_bytes)
        self._tokenizers: WeakValueDictionary[str, Tokenizing] = WeakValueDictionary()
        self._lock = threading.Lock()

    def share(self, tokenizer: Tokenizing) -> Tokenizing:
        """Return the tokenizer to use instead of one: an equal one that is in memory already, or itself."""
        with self._lock:
            if any(shared is tokenizer for shared in self._tokenizers.values()):
                return tokenizer
        name = _identity(tokenizer)
        with self._lock:
            shared = self._tokenizers.setdefault(name, tokenizer)
            if shared is tokenizer:
                remember_contexts(tokenizer, self.cache, name)
            return shared


def _identity(tokenizer: Tokenizing) -> str:
    """Return a hash of everything that decides about tokens."""
    path = Path(tokenizer.name_or_path)
    # A tokenizer that was read from its file alone is the file; writing a large one takes a tenth of a second.
    definition = path.read_bytes() if path.suffix == ".json" and path.is_file() else _definition(tokenizer)
    special = f"{tokenizer.cls_token_id} {tokenizer.pad_token_id}"
    return hashlib.sha256(definition + special.encode()).hexdigest()


def _definition(tokenizer: Tokenizing) -> bytes:
    return tokenizer.backend_tokenizer.to_str().encode()
