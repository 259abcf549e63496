"""Checkpoints of transformers for question answering (`AutoModelForQuestionAnswering`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from lamella.config import WindowOptions
from lamella.data.windows.batches import Batch
from lamella.data.windows.padding import Padded, check_window_length, compute_by_length
from lamella.data.windows.tokenizer_check import check_ids
from lamella.decoding_options import DecodingOptions
from lamella.encoder.acceleration import model_inputs, use_fast_attention
from lamella.encoder.config_check import read_configuration
from lamella.encoder.device import autocast
from lamella.encoder.families import FAMILIES, positions_of, reads_token_types
from lamella.encoder.fast_attention import suitable_kernels
from lamella.encoder.pretrained import build_model, load_tokenizer, quiet
from lamella.encoder.sources import Source
from lamella.errors import ModelError, one_line
from lamella.models.stock_checkpoint import check_architecture, window_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class StockModel:
    """A checkpoint of any architecture with start and end logits."""

    gives_text = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self.model, self.tokenizer, self.folders = model, tokenizer, (folder,)
        self.windows: WindowOptions = window_options(tokenizer.model_max_length)
        self.decoding = DecodingOptions()
        self.precision = "fp32"
        self.rounded = False  # True if the weights are in `precision`, and not only the products

    @classmethod
    def load(cls, source: Source) -> StockModel:
        """Load the weights in fp32."""
        from transformers import MODEL_FOR_QUESTION_ANSWERING_MAPPING, AutoConfig

        check_architecture(source.folder)
        read_configuration(source)  # a wrong number of layers would take all memory or time before it is found
        try:
            with quiet():
                config = AutoConfig.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
            if type(config) not in MODEL_FOR_QUESTION_ANSWERING_MAPPING:
                kind = type(config).__name__.removesuffix("Config")
                raise ModelError(f"transformers has no model with start and end logits for {kind}")
            model, report = build_model(MODEL_FOR_QUESTION_ANSWERING_MAPPING, source, config)
        except Exception as error:  # transformers raises a different class for each kind of damage
            raise ModelError(f"{source.folder}: cannot be loaded: {one_line(error)}.") from None
        if missing := sorted(report["missing_keys"]):
            raise ModelError(f"{source.folder}: the weights lack {', '.join(missing[:3])}.")
        if model.config.model_type in FAMILIES:  # others may mask more than padding, or add to the scores
            use_fast_attention(model)
        tokenizer = load_tokenizer(source)
        check_ids(tokenizer, len(model.get_input_embeddings().weight), source.folder)
        return cls(model, tokenizer, source.folder)

    @property
    def reads_token_types(self) -> bool:
        """Whether question and context have different token types; the tokenizer of ALBERT wrongly denies it."""
        if self.model.config.model_type in FAMILIES:
            return reads_token_types(self.model.config)
        return "token_type_ids" in self.tokenizer.model_input_names

    @property
    def positions(self) -> int | None:
        """The maximum number of tokens in a window, if known."""
        return positions_of(self.model.config)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def to(self, device: torch.device) -> StockModel:
        """Move the weights to a device."""
        torch.nn.Module.to(self.model, device)  # the method of transformers has no types
        return self

    @torch.inference_mode()
    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Return the start and end logits of a padded batch."""
        check_window_length(padded.mask.shape[1], self.positions)
        return compute_by_length(padded, self._compute) if self.device.type == "cpu" else self._compute(padded)

    def _compute(self, padded: Padded) -> NDArray[np.float32]:
        batch = Batch.of(padded).to(self.device)
        inputs, packing = model_inputs(self.model, batch, token_types=self.reads_token_types)
        with autocast(self.device, "fp32" if self.rounded else self.precision), suitable_kernels(self.device):
            output = self.model(**inputs)
        both = [output.start_logits, output.end_logits]
        if packing is not None:
            both = [packing.unpack(logits) for logits in both]
        logits: NDArray[np.float32] = torch.stack(both).float().cpu().numpy()
        return logits  # [2, B, T]
