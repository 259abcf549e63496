"""Write ONNX files: the few messages of the format that a graph needs, in the encoding of Protocol Buffers.

A message is a sequence of fields. A field is a number with a wire type, then its value: an integer of variable length,
four bytes, or bytes with their length in front. The numbers are those of onnx.proto.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Attribute = int | float | str | Sequence[int]

IR_VERSION = 10
OPSETS = {"": 21, "com.microsoft": 1}
ALIGNMENT = 4096  # of tensors in the data file: a page of memory, so that they can be mapped
TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9}
_INTEGER, _BYTES, _FOUR_BYTES = 0, 2, 5  # wire types
_FLOAT, _INT, _STRING, _INTS = 1, 2, 3, 7  # types of attributes


@dataclass(frozen=True)
class Node:
    """An operation of a graph; an empty input name stands for an optional input that is left out."""

    name: str
    kind: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    domain: str = ""


@dataclass(frozen=True)
class Value:
    """An input or output of a graph: its type, and its shape with names for the sizes that vary."""

    name: str
    type: str
    shape: Sequence[int | str]


def encode_graph(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    tensors: Mapping[str, NDArray[Any]],
    *,
    data_file: Path | None = None,
) -> bytes:
    """Return the bytes of an ONNX file; with `data_file`, large tensors are written there, to be memory-mapped."""
    stored = [name for name, tensor in tensors.items() if data_file is not None and tensor.nbytes >= ALIGNMENT]
    places = [] if data_file is None else _write_data(data_file, [tensors[name] for name in stored])
    where = {name: (data_file.name, *place) for name, place in zip(stored, places, strict=True) if data_file}
    graph = [
        *(_message(1, _node(node)) for node in nodes),
        _text(2, "reader"),
        *(_message(5, _tensor(name, tensor, where.get(name))) for name, tensor in tensors.items()),
        *(_message(11, _value(value)) for value in inputs),
        *(_message(12, _value(value)) for value in outputs),
    ]
    model = [
        _integer(1, IR_VERSION),
        _text(2, "lamella"),
        _message(7, graph),
        *(_message(8, [_text(1, domain), _integer(2, version)]) for domain, version in OPSETS.items()),
    ]
    return b"".join(model)


def _write_data(path: Path, tensors: Sequence[NDArray[Any]]) -> list[tuple[int, int]]:
    """Write tensors one after the other at aligned places; return the place and the length of each."""
    places = []
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            places.append((file.tell(), tensor.nbytes))
            file.write(np.ascontiguousarray(tensor).data)
        file.flush()
        os.fsync(file.fileno())
    return places


def _node(node: Node) -> list[bytes]:
    return [
        *(_text(1, value) for value in node.inputs),
        *(_text(2, value) for value in node.outputs),
        _text(3, node.name),
        _text(4, node.kind),
        *(_message(5, _attribute(key, value)) for key, value in node.attributes.items()),
        *([_text(7, node.domain)] if node.domain else []),
    ]


def _attribute(name: str, value: Attribute) -> list[bytes]:
    if isinstance(value, float):
        fields, kind = [_varint(2 << 3 | _FOUR_BYTES), struct.pack("<f", value)], _FLOAT
    elif isinstance(value, int):
        fields, kind = [_integer(3, value)], _INT
    elif isinstance(value, str):
        fields, kind = [_text(4, value)], _STRING
    else:
        fields, kind = [_integer(8, number) for number in value], _INTS
    return [_text(1, name), *fields, _integer(20, kind)]


def _tensor(name: str, tensor: NDArray[Any], place: tuple[str, int, int] | None) -> list[bytes]:
    head = [*(_integer(1, size) for size in tensor.shape), _integer(2, TYPES[tensor.dtype.name]), _text(8, name)]
    if place is None:
        return [*head, _bytes(9, tensor.tobytes())]
    entries = zip(("location", "offset", "length"), place, strict=True)
    return [
        *head,
        *(_message(13, [_text(1, key), _text(2, str(value))]) for key, value in entries),
        _integer(14, 1),  # stored outside of this file
    ]


def _value(value: Value) -> list[bytes]:
    sizes = [_integer(1, size) if isinstance(size, int) else _text(2, size) for size in value.shape]
    shape = _message(2, [_message(1, [size]) for size in sizes])
    return [_text(1, value.name), _message(2, [_message(1, [_integer(1, TYPES[value.type]), shape])])]


def _message(number: int, fields: Sequence[bytes]) -> bytes:
    return _bytes(number, b"".join(fields))


def _text(number: int, text: str) -> bytes:
    return _bytes(number, text.encode())


def _bytes(number: int, data: bytes) -> bytes:
    return b"".join((_varint(number << 3 | _BYTES), _varint(len(data)), data))


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3 | _INTEGER) + _varint(value)


def _varint(value: int) -> bytes:
    """Encode an integer in groups of seven bits, lowest first; a negative one as its 64-bit complement."""
    value &= 2**64 - 1
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    groups.append(value)
    return bytes(groups)
