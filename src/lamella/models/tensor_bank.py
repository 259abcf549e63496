"""A bank: the tensors of many readers on one device, so that a batch gets those of its rows with one operation.

A reader is a row of one large tensor, its slot. All readers have the same layout: the names that any of them has, in
the largest shapes. What a reader does not have is filled with defaults that change nothing. A reader is added in a free
slot; if there is none, or it does not fit the layout, the bank is built again on the device beside the old one, from
the readers that are still in memory. Batches that run meanwhile use the old one: nothing waits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lamella.data.windows.batches import send

Shape = tuple[int, ...]
ALIGNMENT = 16  # elements: kernels for products want their matrices to begin at multiples of 16 or 32 bytes
LEAST = 4  # slots


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a reader in a bank; its tensors stay there while this object is in use."""

    shapes: Mapping[str, Shape]
    nbytes: int


@dataclass(frozen=True)
class _Layout:
    """Where the tensors of a reader are in its slot."""

    shapes: Mapping[str, Shape]
    begins: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[str, Shape]) -> _Layout:
        begins, size = {}, 0
        for name, shape in shapes.items():
            begins[name] = size
            size += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        return cls(shapes, begins, size)

    def fits(self, shapes: Mapping[str, Shape]) -> bool:
        return all(name in self.shapes and _is_within(shape, self.shapes[name]) for name, shape in shapes.items())

    def view(self, slots: Tensor, name: str) -> Tensor:
        """Return the tensors of this name in some slots [N, size], as [N, …]."""
        shape, begin = self.shapes[name], self.begins[name]
        return slots[:, begin : begin + math.prod(shape)].view(-1, *shape)


@dataclass(frozen=True, eq=False)
class _Values:
    """The tensors of all readers with one layout."""

    layout: _Layout
    defaults: Tensor  # [size], on the CPU
    slots: Tensor  # [N, size], on the device
    taken: WeakKeyDictionary[Place, int] = field(default_factory=WeakKeyDictionary)


@dataclass(frozen=True)
class ChosenSlots:
    """The slots of some readers in a bank, which may be built again meanwhile."""

    values: _Values
    slots: list[int]
    names: tuple[str, ...]  # of the tensors that any of them has

    def gather(self, slots: Tensor) -> dict[str, Tensor]:
        """Return these tensors of the readers in some slots, [N, …]."""
        rows = self.values.slots.index_select(0, slots)
        return {name: self.values.layout.view(rows, name) for name in self.names}


class TensorBank:
    """The tensors of many readers. Threads may share it: readers are added while batches run."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        default: Callable[[str], Tensor | float] = lambda name: 0.0,
    ) -> None:
        """Make an empty bank; `default` returns what a reader without a tensor has instead."""
        self.device, self.dtype, self._default = device, dtype, default
        self._adding = threading.Lock()
        self._added = 0  # readers since the bank was built, including those
        empty = torch.empty(0, 0)
        self._values = _Values(_Layout.of({}), empty, empty)

    def __len__(self) -> int:
        """Return the number of readers in memory."""
        return len(self._values.taken)

    @property
    def nbytes(self) -> int:
        """The bytes on the device."""
        return self._values.slots.nbytes

    def add(self, tensors: Mapping[str, Tensor]) -> Place:
        """Add the tensors of a reader, which leave the bank with the object that is returned."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        place = Place(shapes, sum(tensor.numel() for tensor in tensors.values()) * self.dtype.itemsize)
        with self._adding:
            values = self._values
            if not values.layout.fits(shapes) or self._has_wrong_size(values, place):
                values = self._rebuild(values, place)
                self._added = len(values.taken)
            self._added += 1
            taken = set(values.taken.values())
            slot = next(slot for slot in range(len(values.slots)) if slot not in taken)
            row = values.defaults.clone()[None]
            for name, tensor in tensors.items():
                values.layout.view(row, name)[_corner(tensor.shape)] = tensor.to(self.dtype)
            values.slots[slot].copy_(row[0])  # no batch reads a slot that is not taken
            values.taken[place] = slot
            self._values = values
        return place

    def choose(self, places: Sequence[Place]) -> ChosenSlots:
        """Return where the tensors of readers are now, one row for each, or one in all if they are one reader."""
        values = self._values
        slots = [values.taken[place] for place in places]
        if len(set(slots)) == 1:
            slots = slots[:1]
        names = tuple(dict.fromkeys(name for place in dict.fromkeys(places) for name in place.shapes))
        return ChosenSlots(values, slots, names)

    def gather(self, places: Sequence[Place]) -> dict[str, Tensor]:
        """Return the tensors of readers that any of them has, one row for each: [B, …], or [1, …] if all are one."""
        chosen = self.choose(places)
        return chosen.gather(send(torch.tensor(chosen.slots), self.device))

    def _has_wrong_size(self, values: _Values, added: Place) -> bool:
        """Return whether a bank has no free slot, or takes much more memory than the readers that are left need."""
        count, capacity = len(values.taken), len(values.slots)
        if not count < capacity <= max(LEAST, 4 * count):
            return True
        if count == self._added:  # none has left
            return False
        needed = _Layout.of(_largest([*(place.shapes for place in values.taken), added.shapes]))
        return values.layout.size > 2 * needed.size

    def _rebuild(self, old: _Values, added: Place) -> _Values:
        """Build a bank that has room for one more reader, and for no more than twice those in memory."""
        kept = list(old.taken.items())
        layout = _Layout.of(_largest([*(place.shapes for place, _ in kept), added.shapes]))
        defaults = torch.zeros(layout.size, dtype=self.dtype)
        for name in layout.shapes:
            layout.view(defaults[None], name)[:] = self._default(name)
        capacity = max(LEAST, 1 << len(kept).bit_length())
        slots = defaults.to(self.device).repeat(capacity, 1)
        sources = torch.tensor([slot for _, slot in kept], dtype=torch.long).to(self.device)
        for name in layout.shapes if kept else ():
            if name in old.layout.shapes:
                corner = _corner([min(pair) for pair in zip(layout.shapes[name], old.layout.shapes[name], strict=True)])
                copied = old.layout.view(old.slots, name)[sources][corner]
                layout.view(slots, name)[: len(kept)][corner] = copied
        values = _Values(layout, defaults, slots)
        for slot, (place, _) in enumerate(kept):
            values.taken[place] = slot
        return values


def _largest(readers: Iterable[Mapping[str, Shape]]) -> dict[str, Shape]:
    """Return the names that any reader has, each with its largest shape."""
    largest: dict[str, Shape] = {}
    for shapes in readers:
        for name, shape in shapes.items():
            known = largest.get(name, shape)
            largest[name] = tuple(max(pair) for pair in zip(known, shape, strict=True))
    return largest


def _is_within(shape: Shape, limit: Shape) -> bool:
    return all(size <= most for size, most in zip(shape, limit, strict=True))


def _corner(shape: Iterable[int]) -> tuple[slice, ...]:
    """Return the index of the first elements of a tensor along all dimensions but the first."""
    return (slice(None), *(slice(size) for size in shape))
