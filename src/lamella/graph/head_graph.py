"""The graph of a head: mixer stages, then the output of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamella.config import POOLED
from lamella.encoder.layer_choice import choose_layers
from lamella.errors import ConfigError
from lamella.graph.builder import TOKENS, Graph, Size
from lamella.graph.context_mixer import context_cnn
from lamella.graph.conv_mixers import conv_grid, inception, xception
from lamella.graph.encoder_graph import EncoderGraph
from lamella.graph.mixers import compress, encoder_block, weigh, weigh_logits
from lamella.graph.streams import Mixer, StageInputs, Streams
from lamella.graph.support import TASKS, NoGraphError
from lamella.graph.tensor_files import Tensors

# The parts with a graph, by the names that they are registered under. A plugin's part has none.
MIXERS: dict[str, Mixer | None] = {
    "average": weigh,
    "compress": compress,
    "context_cnn": context_cnn,
    "conv_1xn": conv_grid,
    "conv_nxn": conv_grid,
    "dot": None,  # always the only stage: see weigh_logits
    "encoder_block": encoder_block,
    "first_last": weigh,
    "inception": inception,
    "last": weigh,
    "multiplicative": None,
    "scalar_mix": weigh,
    "xception": xception,
}
LAST_ONLY = ("last", "context_cnn")  # mixers that read the last of the selected layers


@dataclass(frozen=True)
class HeadPlan:
    """A head as its options describe it: the stages and the layers that they read."""

    stages: Sequence[Mapping[str, Any]]
    beside: Sequence[Mapping[str, Any]]
    stage_layers: tuple[int, ...]
    beside_layers: tuple[int, ...]
    skip: int | None  # the layer that is concatenated to the output of the stages
    at_cls: bool

    @property
    def layers(self) -> set[int]:
        """The layers to compute, without the pooled output."""
        chosen = {*self.stage_layers, *self.beside_layers, *([] if self.skip is None else [self.skip])}
        return chosen - {POOLED}

    @property
    def pooled(self) -> bool:
        return POOLED in (*self.stage_layers, *self.beside_layers)


def plan_head(spec: Mapping[str, Any], depth: int) -> HeadPlan:
    """Return the plan of a head from the options of a saved model; raise NoGraphError if a part has no graph."""
    task = spec["task"]["name"]
    if task not in TASKS:
        raise NoGraphError(f"the task {task} has no graph builder")
    stages, beside = list(spec["mixer"]), list(spec.get("beside", []))
    for stage in (*stages, *beside):
        if stage["name"] not in MIXERS:
            raise NoGraphError(f"the mixer {stage['name']} has no graph builder")
    try:
        chosen = choose_layers(spec.get("layers", "encoder"), depth)
    except ConfigError as error:
        raise NoGraphError(error.problems[0].rstrip(".")) from None
    return HeadPlan(
        stages,
        beside,
        _read_layers(stages, chosen),
        _read_layers(beside, chosen),
        depth if spec.get("skip") else None,
        TASKS[task],
    )


def add_head(
    graph: Graph, plan: HeadPlan, encoder: EncoderGraph, tensors: Tensors, *, hidden_size: int, longest: int
) -> str:
    """Add a head and return the logits, [O, B, T]; `longest` is the number of tokens of the longest window."""
    return _HeadBuilder(graph, plan, encoder, tensors, hidden_size, longest).build()


class _HeadBuilder:
    def __init__(
        self, graph: Graph, plan: HeadPlan, encoder: EncoderGraph, tensors: Tensors, hidden_size: int, longest: int
    ) -> None:
        self.graph, self.plan, self.tensors, self.hidden_size = graph, plan, tensors, hidden_size
        self.longest = 1 if plan.at_cls else longest
        self.q, self.b = tensors["task.q"], tensors["task.b"]  # [O, W], [O]
        self.layers = {number: self._first_token(layer) for number, layer in encoder.layers.items()}  # [B, T, H]
        if encoder.pooled is not None:
            self.layers[POOLED] = graph.op("Unsqueeze", encoder.pooled, graph.constant(np.array([1])))  # [B, 1, H]

    def build(self) -> str:
        graph, plan, q, b = self.graph, self.plan, self.q, self.b
        if len(plan.stages) == 1 and not plan.beside and plan.skip is None:
            layers = [self.layers[number] for number in plan.stage_layers]
            direct = weigh_logits(self._inputs("stages", 0, plan.stages[0]), layers)
            if direct is not None:
                return self._outputs_first(direct)
        branches = [self._run("stages", plan.stages, plan.stage_layers)]  # each [S, B, T, C · W]
        if plan.beside:
            branches.append(self._run("beside", plan.beside, plan.beside_layers))
        if plan.skip is not None:
            branches.append((graph.op("Unsqueeze", self.layers[plan.skip], graph.constant(np.array([0]))), 1))
        streams = max(count for _, count in branches)
        joined = self._join(branches, streams)
        if streams == 1:  # read by all outputs
            return self._outputs_first(graph.product(graph.op("Squeeze", joined, graph.constant(np.array([0]))), q.T))
        products = graph.product(joined, q[:, None, :, None])  # [O, B, T, 1]
        logits = graph.op("Squeeze", products, graph.constant(np.array([-1])))
        return graph.op("Add", logits, graph.constant(b[:, None, None]))

    def _outputs_first(self, logits: str) -> str:
        """Add the biases to logits [B, T, O] and return them as [O, B, T]."""
        return self.graph.transpose(self.graph.op("Add", logits, self.graph.constant(self.b)), 2, 0, 1)

    def _run(self, place: str, stages: Sequence[Mapping[str, Any]], layers: Sequence[int]) -> tuple[str, int]:
        """Add stages in order; return their output, [S, B, T, C · W], and S."""
        graph = self.graph
        axes = graph.constant(np.array([0, 1]))
        stacked = graph.op("Concat", *(graph.op("Unsqueeze", self.layers[layer], axes) for layer in layers), axis=1)
        x = Streams(stacked, 1, len(layers), self.hidden_size)
        for number, options in enumerate(stages):
            mixer = MIXERS[options["name"]]
            if mixer is None:
                raise NoGraphError(f"the mixer {options['name']} has no graph builder beside other stages")
            x = mixer(self._inputs(place, number, options), x)
        return graph.reshape(graph.transpose(x.value, 0, 2, 3, 1, 4), [0, 0, 0, x.channels * x.width]), x.streams

    def _join(self, branches: Sequence[tuple[str, int]], streams: int) -> str:
        """Concatenate the outputs of several branches, after repeating those with a single stream."""
        graph = self.graph
        if len(branches) == 1:
            return branches[0][0]
        shape = np.array([streams, 1, 1, 1])
        values = [x if count == streams else graph.op("Expand", x, graph.constant(shape)) for x, count in branches]
        return graph.op("Concat", *values, axis=-1)

    def _inputs(self, place: str, number: int, options: Mapping[str, Any]) -> StageInputs:
        tokens: Size = 1 if self.plan.at_cls else TOKENS
        tensors = self.tensors.under(f"{place}.{number}.")
        return StageInputs(self.graph, tensors, options, self._mask, tokens, self.longest, self.q)

    def _mask(self, *, question: bool = False) -> str:
        """Return which tokens are real, [B, T]; with `question`, only those that are not part of the context."""
        graph = self.graph
        real = graph.op("Cast", self._first_token(graph.input("attention_mask")), to=9)  # bool
        if not question:
            return real
        return graph.op("And", real, graph.op("Not", self._first_token(graph.input("is_context"))))

    def _first_token(self, value: str) -> str:
        """Keep the first token of a value [B, T, …] if the task reads nothing else."""
        return self.graph.slice(value, 0, 1, axis=1) if self.plan.at_cls else value


def _read_layers(stages: Sequence[Mapping[str, Any]], chosen: tuple[int, ...]) -> tuple[int, ...]:
    """Return which of the selected layers the first stage reads."""
    if not stages:
        return ()
    first = stages[0]["name"]
    if first in LAST_ONLY:
        return chosen[-1:]
    return (chosen[0], chosen[-1]) if first == "first_last" and len(chosen) > 1 else chosen
