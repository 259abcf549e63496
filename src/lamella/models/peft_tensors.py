"""Read the tensors of a model folder: a saved model, or a LoRA folder of peft under the same names."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from safetensors import safe_open
from torch import Tensor, nn
from torch.linalg import vector_norm

from lamella.encoder.encoder import Encoder
from lamella.encoder.lora import Lora, change_of, changed_layers
from lamella.encoder.low_rank import nearest_of_rank
from lamella.encoder.sources import MODEL_WEIGHTS, PEFT_WEIGHTS, is_peft
from lamella.encoder.tensors import read_tensors, trained_tensors
from lamella.errors import ModelError
from lamella.models.peft_folder import HEAD, MAGNITUDE, TOKEN_TYPES, PeftFolder, read_peft


def read_model_tensors(folder: Path, encoder: Encoder) -> dict[str, Tensor]:
    """Read the trained tensors of a model folder; `encoder` is its base, already tuned in the same way."""
    if not is_peft(folder):
        return read_tensors(folder / MODEL_WEIGHTS)
    peft = read_peft(folder)
    file = {name: value.float() for name, value in read_tensors(folder / PEFT_WEIGHTS).items()}
    # What the file does not have stays as it is: a bias as in the base, LoRA of another layer as at its start.
    tensors = {name: value.detach().clone() for name, value in trained_tensors(encoder).items()}
    for path, layer in changed_layers(encoder.model).items():
        if path in peft.scales:
            lora = cast(Lora, change_of(layer))
            own = {part: tensors[f"model.{path}.lora.{part}"] for part in trained_tensors(lora)}
            _fill(own, lora.scale, layer, peft, file, path)
    tensors |= {f"model.{name}": file[source] for name, source in peft.small.items()}
    if peft.one_token_type:
        tensors[f"model.{TOKEN_TYPES}"][1:] = tensors[f"model.{TOKEN_TYPES}"][0].clone()
    return {f"encoder.{name}": value for name, value in tensors.items()} | _head(peft, file)


def _fill(
    own: dict[str, Tensor], scale: float, layer: nn.Linear, peft: PeftFolder, file: dict[str, Tensor], path: str
) -> None:
    """Set the tensors of one LoRA from the file; a smaller rank and another scale fit into the common ones."""
    outputs, inputs = layer.weight.shape
    rank = len(file[f"{peft.prefix}{path}.lora_A.weight"])
    a = _tensor(peft, file, f"{path}.lora_A.weight", (rank, inputs))
    b = _tensor(peft, file, f"{path}.lora_B.weight", (outputs, rank)) * (peft.scales[path] / scale)
    if "A0" in own:  # peft repeats this decomposition whenever it loads the folder
        a0, b0, _ = nearest_of_rank(layer.weight.detach() / scale, rank)
        own["A0"][: len(a0)], own["B0"][:, : len(a0)] = a0, b0
        a, b = a - own["A0"][:rank], b - own["B0"][:, :rank]
    own["A"][:rank], own["B"][:, :rank] = a, b
    if "m" in own:
        own["m"].copy_(_tensor(peft, file, f"{path}.{MAGNITUDE}", (outputs,)) - vector_norm(layer.weight, dim=1))


def _tensor(peft: PeftFolder, file: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    value = file.get(f"{peft.prefix}{name}")
    if value is None or value.shape != shape:
        found = "none" if value is None else f"shape {list(value.shape)}"
        raise ModelError(
            f"{peft.folder / PEFT_WEIGHTS}: does not fit its base {peft.base.name}: {name}: expected shape "
            f"{list(shape)}, found {found}."
        )
    return value


def _head(peft: PeftFolder, file: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the head; a base that is a question answering checkpoint may have it instead."""
    head = {part: file[name] for part, name in peft.head.items()}
    for path in peft.base.weights:
        with safe_open(path, "pt") as base:
            missing = {f"{HEAD}.{part}": part for part in ("weight", "bias") if part not in head}
            head |= {missing[name]: base.get_tensor(name).float() for name in base.keys() if name in missing}  # noqa: SIM118
    if len(head) < 2 or head["weight"].shape[:1] != (2,):
        raise ModelError(
            f"{peft.folder}: expected a head for question answering ({HEAD}, 2 outputs) in the adapter or in its base, "
            'found none; train and save it with task_type "QUESTION_ANS".'
        )
    return {"head.task.q": head["weight"], "head.task.b": head["bias"]}
