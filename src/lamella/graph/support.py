"""Facts about graphs that are needed to load one, without the modules that build them."""

from __future__ import annotations

VERSION = 1  # to be raised with every change of what is computed, or how: graphs in caches are then made again
LARGEST_FILE = 2**31 - 2**20  # bytes that one file can hold; the tensors of a larger graph need a file of their own
TASKS = {"span": False, "answerability": True}  # the tasks with a graph: whether they read [CLS] alone


class NoGraphError(Exception):
    """This reader has no graph; the message is the reason, a phrase without a full stop."""
