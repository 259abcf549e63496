"""The bottleneck adapter of Houlsby et al., and its insertion into an encoder."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu

NAME = "adapter"


class Adapter(nn.Module):
    """x + W2 · gelu(W1 · x + b1) + b2, with W1 from `width` down to `size` and W2 back up: 2hm + m + h parameters.

    Weights start as N(0, 0.001) truncated at two deviations and biases as 0, so that the encoder starts nearly
    unchanged; with `zero`, W2 starts as 0 and the encoder exactly unchanged. gelu is the tanh approximation, as in the
    paper's code.
    """

    def __init__(self, width: int, size: int, *, zero: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(width, size)
        self.up = nn.Linear(size, width)
        for layer in (self.down, self.up):
            nn.init.trunc_normal_(layer.weight, std=1e-3, a=-2e-3, b=2e-3)
            nn.init.zeros_(layer.bias)
        if zero:
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.up(gelu(self.down(x), approximate="tanh"))
        return x + change


def insert_adapter(site: nn.Module, adapter: Adapter) -> None:
    """Add an adapter behind a module: as its child, applied to its output by a hook.

    Wrapping the module instead would rename the weights of the pretrained encoder. Adapters of an earlier run stay; a
    new adapter gets the next free name and is applied to their output.
    """
    name = NAME
    while hasattr(site, name):
        name = f"{NAME}_{int(name.rpartition('_')[2]) + 1}" if "_" in name else f"{NAME}_2"
    site.add_module(name, adapter)
    site.register_forward_hook(partial(_apply, name))


def _apply(name: str, site: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """Apply an adapter (a forward hook). It is looked up by name, so that a copy of the encoder uses its own."""
    adapted: Tensor = site.get_submodule(name)(output)
    return adapted
