"""All kinds of inputs, by name."""

from __future__ import annotations

from itertools import chain

from broken.cache_kinds import cache_kinds
from broken.command_kinds import command_kinds
from broken.data_kinds import data_kinds
from broken.document_kinds import document_kinds
from broken.kind import Kind
from broken.model_kinds import model_kinds
from broken.run_kinds import run_kinds
from broken.table_kinds import table_kinds

ALL = (data_kinds(), table_kinds(), model_kinds(), run_kinds(), document_kinds(), cache_kinds())
OWN: dict[str, Kind] = {kind.name: kind for kind in chain.from_iterable(ALL)}
KINDS: dict[str, Kind] = OWN | {kind.name: kind for kind in command_kinds(OWN)}
