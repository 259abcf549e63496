"""Export a model to ONNX: encoder and head in one graph, checked against the original model.

The graph is made without torch where that is possible, and traced by torch's exporter otherwise. It is compared with
the logits of torch if torch is installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from lamella.data.demo import data_path
from lamella.data.examples import Example
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import pad
from lamella.encoder.sources import MODEL_CONFIG, Source, named_folder, verified_hash
from lamella.errors import MissingLibraryError, ModelError, UsageError
from lamella.export.onnx_int8 import (
    describe,
    describe_parity,
    largest_difference,
    measure,
    measure_parity,
    quantise,
)
from lamella.files import check_output_folder, new_folder, write_bytes, write_json, write_text
from lamella.graph.reader_graph import ReaderGraph
from lamella.graph.support import LARGEST_FILE, NoGraphError
from lamella.inference.questions import read_questions
from lamella.models.graph_cache import DATA
from lamella.models.graph_model import Recipe, read_recipe
from lamella.models.loading import load_model
from lamella.models.names import find_model
from lamella.models.onnx_model import ONNX_GRAPH, ExportConfig, Identity, OnnxModel, hash_files, is_exported
from lamella.models.tokenizer_file import TOKENIZER

if TYPE_CHECKING:
    from lamella.models.model import ReaderModel
    from lamella.models.transformers_model import StockModel

TOLERANCE = 1e-4  # largest difference from torch's logits: absolute for logits up to 1, relative for larger ones


def export_onnx(
    name: str | os.PathLike[str], folder: Path, *, int8: bool = False, data: str | None = None
) -> list[str]:
    """Write a model as a folder for onnxruntime; return lines that describe it.

    `data` is a file with true answers, to measure the cost of `int8` on.
    """
    source = _check_call(os.fspath(name), folder, int8, data)
    examples = read_questions(data, labelled=True) if data else []
    recipe, graph = _build(source)
    in_torch = _load_torch(os.fspath(name)) if graph is None or importlib.util.find_spec("torch") else None
    with new_folder(folder, replace=False) as fresh:
        if recipe is not None and graph is not None:
            config, products = _write_built(recipe, graph, fresh), graph.products
        else:
            assert in_torch is not None
            config, products = _write_traced(os.fspath(name), in_torch, fresh)
        exported = OnnxModel.open(fresh, config)
        lines = ["the logits were not compared with torch's: torch is not installed"]
        if in_torch is not None:
            config = config.model_copy(update={"parity": _compare(in_torch, exported)})
            lines = [f"logits differ from torch's by at most {config.parity:.1e}"]
        if int8:
            if recipe is not None and graph is not None:
                (fresh / DATA).unlink(missing_ok=True)  # not overwritten: the fp32 graph has it in its memory
                _write_built(recipe, graph.in_int8(), fresh)
            else:
                quantise(fresh, products)
            rounded = OnnxModel.open(fresh, config)
            parity = measure_parity(in_torch or exported, rounded, _sample())
            measured = measure(exported, rounded, data, examples) if data else None
            config = config.model_copy(update={"precision": "int8", "int8_parity": parity, "int8": measured})
            reference = "torch's" if in_torch is not None else "those in fp32"
            lines = [describe_parity(parity, reference), describe(measured)]
        write_json(fresh / MODEL_CONFIG, config.model_copy(update={"sha256": hash_files(fresh)}).model_dump())
    return [f"{folder}: written, {config.precision}", *lines]


def _build(source: Source) -> tuple[Recipe | None, ReaderGraph | None]:
    """Build the graph without torch; None if that is not possible."""
    try:
        recipe = read_recipe(source)
        return recipe, recipe.build()
    except NoGraphError as reason:
        if importlib.util.find_spec("torch") is None:
            raise MissingLibraryError(f"export --onnx of this model ({reason})", ["torch"]) from None
        return None, None


def _write_built(recipe: Recipe, graph: ReaderGraph, folder: Path) -> ExportConfig:
    data = folder / DATA if graph.size > LARGEST_FILE else None
    write_bytes(folder / ONNX_GRAPH, graph.encode(data_file=data))
    write_text(folder / TOKENIZER, recipe.tokenizer.backend_tokenizer.to_str())
    return recipe.describe()


def _write_traced(name: str, model: ReaderModel | StockModel, folder: Path) -> tuple[ExportConfig, list[str]]:
    from lamella.export.onnx_trace import trace_model

    features = featurise(_sample(), model.tokenizer, model.windows)
    products = trace_model(model, pad(features, np.arange(len(features))), folder / ONNX_GRAPH)
    write_text(folder / TOKENIZER, model.tokenizer.backend_tokenizer.to_str())
    config = ExportConfig(
        source=Identity(name=name, sha256=verified_hash(Source(name, model.folders[0], "folder"))),
        gives_text=model.gives_text,
        windows=model.windows,
        decoding=model.decoding,
        cls_token_id=model.tokenizer.cls_token_id,
        pad_token_id=model.tokenizer.pad_token_id or 0,
        positions=model.positions,
    )
    return config, products


def _load_torch(name: str) -> ReaderModel | StockModel:
    model = load_model(name, device="cpu", precision="fp32", backend="torch")
    return cast("ReaderModel | StockModel", model)


def _sample() -> Sequence[Example]:
    """Return questions with windows of different lengths, to trace and to compare with."""
    return read_questions(str(data_path("demo:dev")))[:6]


def _compare(model: ReaderModel | StockModel, exported: OnnxModel) -> float:
    """Return the largest difference from torch's logits, for batches and single windows; raise if too large."""
    features = featurise(_sample(), exported.tokenizer, exported.windows)
    largest = 0.0
    every, longest = np.arange(len(features)), np.argmax(features.lengths, keepdims=True)
    for run, windows in (
        (exported.logits, every),
        (exported.logits_in_one_run, every),
        (exported.logits_in_one_run, longest),
    ):
        padded = pad(features, windows)
        expected, logits = model.logits(padded), run(padded)
        difference = largest_difference(expected, logits, padded)
        allowed = TOLERANCE * max(1.0, largest_difference(np.zeros_like(expected), expected, padded))
        if not difference <= allowed:  # also true for nan
            raise ModelError(
                f"the ONNX graph does not match the model: expected logits within {allowed:.1e}, got a difference of "
                f"{difference:.1e}; nothing was written."
            )
        largest = max(largest, difference)
    return largest


def _check_call(name: str, folder: Path, int8: bool, data: str | None) -> Source:
    """Check the arguments before any slow work; return the model to export."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingLibraryError("export --onnx", ["onnxruntime"])
    if data and not int8:
        raise UsageError("export: expected --int8 with --data, which measures its loss.")
    check_output_folder(folder)
    place = named_folder(name)
    if os.path.isdir(place) and is_exported(place):
        raise UsageError(f"{name}: is an ONNX export already; export the model that it was made from.")
    return find_model(name)
