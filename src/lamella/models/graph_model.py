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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamella.config import HEAD_OPTIONS, WindowOptions
from lamella.data.windows.tokenizer_check import check_ids
from lamella.decoding_options import DecodingOptions
from lamella.encoder.config_check import read_configuration
from lamella.encoder.families import positions_of
from lamella.encoder.identity import Difference
from lamella.encoder.sources import (
    MODEL_WEIGHTS,
    Source,
    find_encoder,
    is_model,
    is_peft,
    is_saved_model,
    verified_hash,
)
from lamella.environment import has_int8_products
from lamella.errors import EncoderError, ModelError
from lamella.graph.encoder_config import EncoderConfig, read_encoder_config
from lamella.graph.support import TASKS, VERSION, NoGraphError
from lamella.models.base_identity import FoundTensors, check_base
from lamella.models.base_tokenizer import open_tokenizer_of
from lamella.models.graph_cache import open_cached
from lamella.models.onnx_model import ExportConfig, Identity, OnnxModel
from lamella.models.saved import SavedModel, check_weights, read_saved
from lamella.models.stock_checkpoint import check_architecture, window_options
from lamella.models.tokenizer_file import TOKENIZER, TokenizerFile, open_tokenizer, read_options
from lamella.user_cache import remembered, remembered_sha256

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
    original_sha256: str | None = None  # hash of the tensors of the base, if it is the original of a rounded copy

    @property
    def key(self) -> str:
        """The name of the graph in the cache."""
        parts = [VERSION, self.precision, self.sha256, asdict(self.config), self.head, self.windows.max_seq_length]
        if self.by_token:
            parts.append("by token")
        if self.original_sha256 is not None:  # the hash of the model stands for the rounded copy
            parts.append(self.original_sha256)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def by_token(self) -> bool:
        """Whether products in int8 have one scale per token; the form depends on the processor."""
        return self.precision == "int8" and has_int8_products()

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
        if self.precision != "int8":
            return graph
        try:
            return graph.in_int8(by_token=self.by_token)
        except ModelError as error:
            raise ModelError(f"{self.source.folder}: {error}") from None

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
    chain, base, original = _read_chain(folder) if saved else ([], source, None)
    configuration = read_configuration(base)
    config = read_encoder_config(configuration)
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
    tokenizer = open_tokenizer_of(folder, config.model_type, open_tokenizer)
    if tokenizer is None:
        raise NoGraphError(f"its tokenizer has no {TOKENIZER} with a first token, and needs transformers")
    if (rows := configuration.get("vocab_size")) is not None:
        check_ids(tokenizer, rows, folder, every=False)  # onnxruntime refuses an id only when it meets it
    sha256 = verified_hash(source, hash_file=remembered_sha256)
    recipe = Recipe(source, tuple(chain), base, sha256, config, head, windows, decoding, tokenizer)
    return replace(recipe, original_sha256=original)


def _read_chain(folder: Path) -> tuple[list[tuple[Path, SavedModel]], Source, str | None]:
    """Read a saved model and the saved models below it, and check that each is built on the right weights.

    Also return the hash of the tensors of the base, if it is the original of a rounded copy.
    """
    chain: list[tuple[Path, SavedModel]] = []
    reads_pooled = False
    while True:
        saved = read_saved(folder, check_parts=False)
        check_weights(folder, saved, hash_file=remembered_sha256)
        chain.append((folder, saved))
        try:
            base = find_encoder(saved.base_name)
            sha256 = verified_hash(base, hash_file=remembered_sha256)
        except EncoderError as error:
            raise ModelError(f"{folder}: the base encoder cannot be loaded: {error}") from None
        reads_pooled |= str(saved.config.learner.layers) in POOLED
        original = find_original(folder, saved, base, sha256, reads_pooled=reads_pooled)
        if is_peft(base.folder) or base.folder.resolve() in [below.resolve() for below, _ in chain]:
            raise NoGraphError("its base model has no graph")
        if not is_saved_model(base.folder):
            return chain, base, original
        folder = base.folder


def find_original(folder: Path, saved: SavedModel, base: Source, sha256: str, *, reads_pooled: bool) -> str | None:
    """Check the base encoder of a saved model, as `check_base` does; return the hash of the original of a rounded copy.

    Raise NoGraphError for a wrong encoder, which torch reports, but ModelError if the model accepts an original.
    """
    comparable = saved.base_tensors_sha256 is not None and not is_model(base.folder) and not reads_pooled
    examine = partial(_examine, saved, base, sha256) if comparable else None  # the pooler has no hash
    if saved.rounding is not None or sha256 == saved.base_sha256:
        return check_base(folder, saved, sha256, examine)
    if examine is None or examine().sha256 != saved.base_tensors_sha256:
        raise NoGraphError(f"its base encoder {saved.base_name} is not the file that it was trained on")
    return None


def _examine(saved: SavedModel, base: Source, sha256: str) -> FoundTensors:
    """Read the tensors of an encoder and compare them; only once, because a user may have no other file of it."""
    config = read_encoder_config(read_configuration(base))

    def compute() -> FoundTensors:
        from lamella.graph.tensor_files import read_tensor_files
        from lamella.graph.tuned_tensors import encoder_parameters

        return FoundTensors.examine(encoder_parameters(read_tensor_files(base.weights), config), saved)

    rounding = asdict(saved.rounding) if saved.rounding else None
    tensors, difference = remembered([VERSION, "tensors", sha256, config.model_type, rounding], compute)
    return FoundTensors(tensors, None if difference is None else Difference(*difference))
