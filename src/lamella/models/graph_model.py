"""Answer with a graph that is made from a model folder, without torch or transformers.

The graph is made once and kept in the user's cache, under a hash of everything that it depends on:

    graphs/<sha256>/model.onnx        the graph
    graphs/<sha256>/model.onnx.data   its tensors, which onnxruntime maps into memory
    graphs/<sha256>/state.json        sizes and times of both files: if one was changed since, the graph is made again

Without a cache, because there is none, or it is full or cannot be written, the graph is made for this process alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamella.config import HEAD_OPTIONS, DecodingOptions, WindowOptions
from lamella.encoder.families import positions_of
from lamella.encoder.sources import (
    MODEL_CONFIG,
    MODEL_WEIGHTS,
    Source,
    find_encoder,
    is_peft,
    is_saved_model,
    verified_hash,
)
from lamella.errors import EncoderError, ModelError
from lamella.files import read_json
from lamella.graph.encoder_config import EncoderConfig, read_encoder_config
from lamella.graph.support import TASKS, VERSION, NoGraphError
from lamella.models.graph_cache import open_cached
from lamella.models.onnx_model import ExportConfig, Identity, OnnxModel
from lamella.models.saved import SavedModel, check_weights, read_saved
from lamella.models.stock_checkpoint import check_architecture, window_options
from lamella.models.tokenizer_file import TOKENIZER, TokenizerFile, open_tokenizer, read_options
from lamella.user_cache import remembered_sha256

if TYPE_CHECKING:
    from lamella.graph.reader_graph import ReaderGraph
    from lamella.graph.tuned_tensors import ParameterCounts

GraphPrecision = Literal["fp32", "int8"]
STOCK_HEAD = {"task": {"name": "span"}, "mixer": [{"name": "last"}]}  # of a checkpoint of transformers
POOLED = ("pooled", "pooled+all")  # choices of layers that may read the pooled output
STOCK_TENSORS = {"qa_outputs.weight": "task.q", "qa_outputs.bias": "task.b"}


@dataclass(frozen=True)
class Recipe:
    """Everything that the graph of a model is made from."""

    source: Source
    chain: tuple[tuple[Path, SavedModel], ...]  # the model and the saved models below it; empty for a checkpoint
    base: Source  # the pretrained encoder, or the checkpoint
    sha256: str  # of the model
    config: EncoderConfig
    head: Mapping[str, Any]
    windows: WindowOptions
    decoding: DecodingOptions
    tokenizer: TokenizerFile
    precision: GraphPrecision = "fp32"

    @property
    def key(self) -> str:
        """The name of the graph in the cache."""
        parts = [VERSION, self.precision, self.sha256, asdict(self.config), self.head, self.windows.max_seq_length]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that the model is read from."""
        return tuple(dict.fromkeys([*(folder for folder, _ in self.chain), self.base.folder]))

    def build(self) -> ReaderGraph:
        """Read all tensors and build the graph."""
        from lamella.graph.reader_graph import build_reader  # not needed for a graph in the cache
        from lamella.graph.tensor_files import Tensors, read_tensor_files
        from lamella.graph.tuned_tensors import apply_delta, pretrained_tensors

        file = read_tensor_files(self.base.weights)
        encoder = pretrained_tensors(file, self.config)
        head = Tensors({ours: file[name] for name, ours in STOCK_TENSORS.items() if name in file})
        if not self.chain and len(head) < len(STOCK_TENSORS):
            missing = [name for name in STOCK_TENSORS if name not in file]
            raise ModelError(f"{self.base.folder}: the weights lack {', '.join(missing)}.")
        for folder, saved in reversed(self.chain):
            delta = read_tensor_files([folder / MODEL_WEIGHTS])
            encoder = apply_delta(encoder, delta.under("encoder.model."), saved.tunings, self.config)
            head = delta.under("head.")
        graph = build_reader(self.config, encoder, self.head, head, self.windows.max_seq_length)
        return graph.in_int8() if self.precision == "int8" else graph

    def count_parameters(self) -> ParameterCounts | None:
        """Count the parameters of a saved model; the checkpoints of transformers are not counted."""
        from lamella.graph.head_graph import plan_head
        from lamella.graph.tensor_files import read_sizes
        from lamella.graph.tuned_tensors import count_parameters

        deltas = [read_sizes([folder / MODEL_WEIGHTS]) for folder, _ in reversed(self.chain)]
        pooler = plan_head(self.head, self.config.depth).pooled
        return count_parameters(read_sizes(self.base.weights), deltas, self.config, pooler=pooler) if deltas else None

    def describe(self) -> ExportConfig:
        """Return the configuration of the model as an exported folder stores it."""
        return ExportConfig(
            source=Identity(name=self.source.name, sha256=self.sha256),
            gives_text=not TASKS[self.head["task"]["name"]],
            windows=self.windows,
            decoding=self.decoding,
            cls_token_id=self.tokenizer.cls_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            positions=positions_of(self.config),
            precision=self.precision,
        )


def load_as_graph(source: Source, *, precision: GraphPrecision = "fp32", **options: Any) -> OnnxModel:
    """Load a saved model or a checkpoint of transformers as a graph; raise NoGraphError if it has none.

    `options` are those of OnnxModel.
    """
    recipe = replace(read_recipe(source), precision=precision)
    config = recipe.describe()
    model = open_cached(
        recipe.key,
        recipe.build,
        lambda graph: OnnxModel(recipe.folders, config, recipe.tokenizer, graph, **options),
    )
    model.count_parameters = recipe.count_parameters
    return model


def read_recipe(
    source: Source, *, open_tokenizer: Callable[[Path, str], TokenizerFile | None] = open_tokenizer
) -> Recipe:
    """Read and check everything about a model except its tensors, which are only hashed."""
    folder = source.folder
    if is_peft(folder):
        raise NoGraphError("LoRA folders of peft have no graph builder")
    saved = is_saved_model(folder)
    if not saved:
        check_architecture(folder)
    chain, base = _read_chain(folder) if saved else ([], source)
    config = read_encoder_config(read_json(base.folder / MODEL_CONFIG))
    if saved:
        options = chain[0][1].config
        head = {name: getattr(options.learner, name) for name in HEAD_OPTIONS}
        windows, decoding = options.windows, options.decoding
    else:
        windows, decoding = window_options(read_options(folder).get("model_max_length")), DecodingOptions()
        head = STOCK_HEAD
    if head["task"]["name"] not in TASKS:
        raise NoGraphError(f"the task {head['task']['name']} has no graph builder")
    if saved and windows.max_seq_length > (positions_of(config) or 0):
        raise NoGraphError("its windows are longer than the positions of its encoder")
    tokenizer = open_tokenizer(folder, config.model_type) if (folder / TOKENIZER).is_file() else None
    if tokenizer is None:
        raise NoGraphError(f"its tokenizer has no {TOKENIZER} with a first token, and needs transformers")
    sha256 = verified_hash(source, hash_file=remembered_sha256)
    return Recipe(source, tuple(chain), base, sha256, config, head, windows, decoding, tokenizer)


def _read_chain(folder: Path) -> tuple[list[tuple[Path, SavedModel]], Source]:
    """Read a saved model and the saved models below it, and check that each is built on the right weights."""
    chain: list[tuple[Path, SavedModel]] = []
    while True:
        saved = read_saved(folder, check_parts=False)
        check_weights(folder, saved, hash_file=remembered_sha256)
        chain.append((folder, saved))
        try:
            base = find_encoder(saved.base_name)
            sha256 = verified_hash(base, hash_file=remembered_sha256)
        except EncoderError as error:
            raise ModelError(f"{folder}: the base encoder cannot be loaded: {error}") from None
        if sha256 != saved.base_sha256 and not _has_tensors(base, saved):
            raise NoGraphError(f"its base encoder {saved.base_name} is not the file that it was trained on")
        if is_peft(base.folder) or base.folder.resolve() in [below.resolve() for below, _ in chain]:
            raise NoGraphError("its base model has no graph")
        if not is_saved_model(base.folder):
            return chain, base
        folder = base.folder


def _has_tensors(base: Source, saved: SavedModel) -> bool:
    """Return whether an encoder in another file has the tensors that a model was trained on; the pooler has no hash."""
    if saved.base_tensors_sha256 is None or is_saved_model(base.folder) or str(saved.config.learner.layers) in POOLED:
        return False
    from lamella.graph.tensor_files import read_tensor_files
    from lamella.graph.tuned_tensors import hash_encoder

    config = read_encoder_config(read_json(base.folder / MODEL_CONFIG))
    return hash_encoder(read_tensor_files(base.weights), config) == saved.base_tensors_sha256
