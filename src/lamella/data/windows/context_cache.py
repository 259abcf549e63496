"""The tokens of the contexts that were read last, so that many questions about a text tokenise it once."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

Tokens = tuple[NDArray[np.int32], NDArray[np.int32]]  # ids, offsets
ENTRY = 500  # bytes that an entry takes besides its text and its arrays


class ContextCache:
    """Tokens by tokenizer and text, up to a number of bytes; the least recently used leave. Threads may share it."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.hits, self.misses = 0, 0
        self._tokens: OrderedDict[tuple[str, str], Tokens] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, tokenizer: str, text: str) -> Tokens | None:
        """Return the tokens of a text, if they are known."""
        with self._lock:
            tokens = self._tokens.get((tokenizer, text))
            if tokens is None:
                self.misses += 1
            else:
                self.hits += 1
                self._tokens.move_to_end((tokenizer, text))
            return tokens

    def put(self, tokenizer: str, text: str, tokens: Tokens) -> None:
        """Keep the tokens of a text, unless they alone would fill a quarter of the room."""
        size = _size(text, tokens)
        if size > self.most_bytes // 4:
            return
        for array in tokens:
            array.flags.writeable = False  # others will read it
        with self._lock:
            if (tokenizer, text) in self._tokens:  # another thread was faster
                return
            self._tokens[tokenizer, text] = tokens
            self.bytes += size
            while self.bytes > self.most_bytes:
                (_, oldest), removed = self._tokens.popitem(last=False)
                self.bytes -= _size(oldest, removed)

    def __len__(self) -> int:
        return len(self._tokens)


def _size(text: str, tokens: Tokens) -> int:
    return sys.getsizeof(text) + sum(array.nbytes for array in tokens) + ENTRY
