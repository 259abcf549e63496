"""Operations that encoders and heads share: linear layers, LayerNorms and activations."""

from __future__ import annotations

from lamella.graph.builder import MICROSOFT, Graph
from lamella.graph.support import NoGraphError
from lamella.graph.tensor_files import Tensors

EXACT_GELUS = ("gelu", "gelu_python")
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # one formula, written in three ways

# Names of changes that are not merged into the weight of a linear layer, after its path. B includes the scale.
LORA_A, LORA_B = "lora.A", "lora.B"
INPUT_FACTOR, OUTPUT_FACTOR = "ia3.inputs", "ia3.outputs"


def linear(graph: Graph, tensors: Tensors, path: str, x: str, *, bias: bool = True) -> str:
    """Add a linear layer, x Wᵀ + b, with the changes that are not merged into its weight: LoRA and IA³.

    LoRA adds (x Aᵀ) Bᵀ. IA³ multiplies the product, or the inputs, by a factor; that of the bias is merged into it.
    """
    if (factor := f"{path}.{INPUT_FACTOR}") in tensors:
        x = graph.op("Mul", x, _constant(graph, tensors, factor))
    product = _product(graph, tensors, f"{path}.weight", x)
    if (a := f"{path}.{LORA_A}") in tensors:
        change = _product(graph, tensors, f"{path}.{LORA_B}", _product(graph, tensors, a, x))
        product = graph.op("Add", product, change)
    if (factor := f"{path}.{OUTPUT_FACTOR}") in tensors:
        product = graph.op("Mul", product, _constant(graph, tensors, factor))
    return graph.op("Add", product, _constant(graph, tensors, f"{path}.bias")) if bias else product


def normalise(graph: Graph, tensors: Tensors, path: str, x: str, epsilon: float) -> str:
    """Add a LayerNorm over the last axis."""
    weight, bias = (_constant(graph, tensors, f"{path}.{part}") for part in ("weight", "bias"))
    return graph.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=float(epsilon))


def activate(graph: Graph, name: str, x: str) -> str:
    """Add an activation by the name that transformers gives it."""
    if name in EXACT_GELUS:
        return graph.op("Gelu", x, domain=MICROSOFT)
    if name in TANH_GELUS:
        return graph.op("FastGelu", x, domain=MICROSOFT)
    if name == "relu":
        return graph.op("Relu", x)
    if name in ("silu", "swish"):
        return graph.op("Mul", x, graph.op("Sigmoid", x))
    raise NoGraphError(f"the activation {name} has no graph builder")


def _product(graph: Graph, tensors: Tensors, name: str, x: str) -> str:
    return graph.product(x, tensors[name].T, tensors.prefix + name)


def _constant(graph: Graph, tensors: Tensors, name: str) -> str:
    return graph.constant(tensors[name], tensors.prefix + name)
