"""Read the configuration of a LoRA folder that peft wrote, without peft.

The folder is a model on a base encoder, like a saved model of Lamella:

    adapter_config.json         the name of the base encoder, rank, alpha, …
    adapter_model.safetensors   A and B of each projection, the head, other trained modules

Which projections and small parts were trained is read from the names of the tensors. Nothing here imports torch;
`peft_tensors` reads the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from lamella.config import WindowOptions
from lamella.encoder.families import family_of, positions_of, reads_token_types
from lamella.encoder.sources import PEFT_CONFIG, PEFT_WEIGHTS, Source, find_encoder
from lamella.errors import EncoderError, ModelError, counted, one_line, shorten
from lamella.files import read_json

PREFIX = "base_model.model."  # of every tensor in a PEFT folder
HEAD = "qa_outputs"
TASK = "QUESTION_ANS"  # the task_type for which peft ignores token types: see PeftFolder.one_token_type
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
MAGNITUDE = "lora_magnitude_vector"

# Keys of adapter_config.json that are read here, or that matter only in training. Any other key that is set means an
# adapter which computes something else.
KNOWN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type"),
    *("peft_version", "qalora_group_size", "r", "rank_pattern", "target_modules", "task_type", "use_dora"),
    *("use_rslora",),
}
# Starts that leave the base encoder as it is; the others take something out of its weights.
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
ADVICE = "merge it with merge_and_unload of peft, and load the result"


@dataclass(frozen=True)
class PeftFolder:
    """A LoRA folder of peft, in the terms of Lamella."""

    folder: Path
    base: Source
    positions: int  # the number of tokens that the base can read
    tuning: dict[str, Any]
    scales: dict[str, float]  # of each projection with LoRA, by its path in the encoder: alpha/rank
    small: dict[str, str] = field(default_factory=dict)  # other trained parameters: name in the encoder -> in the file
    head: dict[str, str] = field(default_factory=dict)  # `weight` and `bias` -> name in the file, if it is there
    prefix: str = ""  # of the encoder in the names of the file, such as `base_model.model.bert.`
    # PeftModelForQuestionAnswering accepts token types and does not pass them on, so that the encoder was trained, and
    # computes, with the first type for question and context alike.
    one_token_type: bool = False

    @property
    def windows(self) -> dict[str, Any]:
        """Window options, which peft does not record: the defaults, or less on a short encoder."""
        default = WindowOptions()
        longest = min(default.max_seq_length, self.positions)
        third = longest // 3
        return {
            "max_seq_length": longest,
            "doc_stride": min(default.doc_stride, third),
            "max_query_length": min(default.max_query_length, third),
        }


def read_peft(folder: Path) -> PeftFolder:
    """Read and check a LoRA folder of peft for question answering."""
    path = folder / PEFT_CONFIG
    config = read_json(path)
    _check_config(config, path)
    try:
        base = find_encoder(config["base_model_name_or_path"])
    except EncoderError as error:
        raise ModelError(f"{folder}: the base encoder cannot be loaded: {error}") from None
    shapes = _read_shapes(folder / PEFT_WEIGHTS)
    return _describe(folder, base, config, shapes)


def _check_config(config: Any, path: Path) -> None:
    if not isinstance(config, dict) or not isinstance(config.get("base_model_name_or_path"), str):
        raise ModelError(f"{path}: expected the configuration of an adapter, with base_model_name_or_path.")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: expected peft_type LORA, got {config.get('peft_type')!r}; {ADVICE}.")
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_STARTS and start != "pissa":
        raise ModelError(
            f"{path}: init_lora_weights {start!r} changed the base encoder itself; save the adapter with "
            "path_initial_model_for_weight_conversion, which makes it plain LoRA."
        )
    _check_numbers(config, path)
    unknown = sorted(key for key, value in config.items() if key not in KNOWN and value)
    if config.get("revision") in ("main", None):
        unknown = [key for key in unknown if key != "revision"]
    if unknown:
        raise ModelError(f"{path}: expected plain LoRA, rsLoRA or DoRA, got {unknown[0]}; {ADVICE}.")


def _check_numbers(config: Mapping[str, Any], path: Path) -> None:
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{path}: alpha_pattern: expected a table, got {shorten(patterns)}.")
    numbers = {"lora_alpha": config.get("lora_alpha", 8), "lora_dropout": config.get("lora_dropout") or 0.0}
    for pattern, alpha in patterns.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(
                f"{path}: alpha_pattern: expected regular expressions, got {pattern!r} ({error})."
            ) from None
        numbers[f"alpha_pattern.{pattern}"] = alpha
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{path}: {key}: expected a number, got {shorten(value)}.")
        if value <= 0 and key != "lora_dropout":
            raise ModelError(f"{path}: {key}: expected a number greater than 0, got {value}.")


def _read_shapes(path: Path) -> dict[str, list[int]]:
    if not path.is_file():
        raise ModelError(f"{path}: no such file; the folder is incomplete, or holds a pickle, which is never loaded.")
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except SafetensorError as error:
        raise ModelError(f"{path}: expected a safetensors file, found a damaged one ({one_line(error)}).") from None


def _describe(folder: Path, base: Source, config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> PeftFolder:
    from lamella.encoder.pretrained import load_configuration  # imports torch

    encoder = load_configuration(base)
    family = family_of(encoder.model_type, str(base.folder))
    if not family.linear_qa:
        raise ModelError(
            f"{folder}: expected LoRA on an encoder with a linear question answering head in transformers, got "
            f"{encoder.model_type}."
        )
    layer = re.escape(family.layers) + r"\.\d+" + (r"\.albert_layers\.\d+" if family.shared_layers else "")
    paths = "|".join(re.escape(path) for path in family.projections.values() if isinstance(path, str))
    projection = re.compile(rf"({re.escape(PREFIX)}(?:\w+\.)?)({layer}\.({paths}))\.lora_A\.weight")
    matches = [match for name in shapes if (match := projection.fullmatch(name))]
    if not matches:
        raise ModelError(f"{folder}: expected LoRA on projections of the encoder {base.name}, found none.")
    prefix, chosen = matches[0][1], {match[3] for match in matches}
    for match in matches:
        if len(shape := shapes[match[0]]) != 2 or not shape[0]:
            raise ModelError(
                f"{folder / PEFT_WEIGHTS}: {match[0]}: expected a matrix with at least one row, found shape {shape}."
            )
    ranks = {match[2]: shapes[match[0]][0] for match in matches}
    small, head = _sort_rest(folder, shapes, ranks, prefix)
    one_token_type = reads_token_types(encoder) and config.get("task_type") == TASK
    rank, alpha = max(ranks.values()), config.get("lora_alpha", 8)
    tuning = {
        "name": "lora",
        "rank": rank,
        "alpha": int(alpha) if alpha >= 1 and float(alpha).is_integer() else rank,
        "dropout": float(config.get("lora_dropout") or 0.0),
        "targets": [target for target, path in family.projections.items() if path in chosen],
        "also": _small_groups([*small, *([TOKEN_TYPES] if one_token_type else [])]),
        **{ours: True for ours, theirs in (("rslora", "use_rslora"), ("dora", "use_dora")) if config.get(theirs)},
        **({"init": "pissa"} if config.get("init_lora_weights") == "pissa" else {}),
    }
    root = math.sqrt if config.get("use_rslora") else float
    alphas = {path: _of_pattern(config.get("alpha_pattern"), prefix + path, alpha) for path in ranks}
    scales = {path: alphas[path] / root(rank) for path, rank in ranks.items()}
    positions = cast(int, positions_of(encoder))
    return PeftFolder(folder, base, positions, tuning, scales, small, head, prefix, one_token_type)


def _sort_rest(
    folder: Path, names: Iterable[str], projections: Iterable[str], prefix: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the small parts and the head in a file; any other tensor that does not belong to LoRA is an error."""
    parts = ("lora_A.weight", "lora_B.weight", MAGNITUDE)
    lora = {f"{prefix}{path}.{part}" for path in projections for part in parts}
    small, head, others = {}, {}, []
    for name in sorted(names, key=len, reverse=True):  # of two names for a tensor, the plain one is the last
        if name in lora or ".original_module." in name:  # the latter is a copy of the base
            continue
        plain = name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
        if plain in (f"{PREFIX}{HEAD}.weight", f"{PREFIX}{HEAD}.bias"):
            head[plain.rpartition(".")[2]] = name
        elif plain.startswith(prefix) and _small_groups([plain]) and "lora_" not in plain:
            small[plain.removeprefix(prefix)] = name
        else:
            others.append(name)
    if others:
        more = f" and {counted(len(others) - 1, 'other tensor')}" if len(others) > 1 else ""
        raise ModelError(f"{folder / PEFT_WEIGHTS}: the tuning lora cannot hold {others[-1]}{more}; {ADVICE}.")
    return small, head


def _small_groups(names: Iterable[str]) -> list[str]:
    """Return the values of the option `also` that cover some parameters, by their names."""
    names = list(names)
    norms = {name.rpartition(".")[0] for name in names if re.search(r"layer_?norm\.weight$", name, re.IGNORECASE)}
    groups = {
        "layer_norm": bool(norms),
        "bias": any(name.endswith(".bias") and name.rpartition(".")[0] not in norms for name in names),
        "token_types": any(name.endswith("token_type_embeddings.weight") for name in names),
    }
    return [group for group, present in groups.items() if present]


def _of_pattern(patterns: Mapping[str, float] | None, name: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module's name, as peft does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name.removeprefix(PREFIX)):
            return value
    return default
