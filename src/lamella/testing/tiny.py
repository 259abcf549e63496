"""Tiny random encoders of every family with real tokenizers, and batches for them; no network is needed."""

from __future__ import annotations

import functools
import json
import re
import tempfile
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from lamella.config import RunConfig
from lamella.data.demo import data_path
from lamella.data.examples import Context, Example
from lamella.data.windows.batches import Batch, collate
from lamella.data.windows.features import featurise
from lamella.encoder.encoder import Encoder
from lamella.encoder.families import FAMILIES as FAMILY_TABLE
from lamella.encoder.pretrained import LoadedEncoder
from lamella.validation import check_config

FAMILIES = (
    "albert",
    "bert",
    "deberta-v2",
    "distilbert",
    "electra",
    "eurobert",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
)
HIDDEN, DEPTH = 32, 3
AWKWARD = (
    "Cafe\u0301 Zoë naïve 서울은 한국의 수도 東京は日本 القاهرة مدينة שלום עולם 👩‍🚀 went 🇫🇷 to the 👍🏽 "
    "“moon” — at 3.5°C नमस्ते दुनिया e\u0301\u0327te\u0301"
)


def tiny_encoder(family: str = "bert", *, seed: int = 0, pooler: bool = False, **options: Any) -> LoadedEncoder:
    """Return a random encoder of the family in evaluation mode; `options` go to its configuration."""
    torch.manual_seed(seed)
    config = tiny_config(family, **options)
    pooling = {"add_pooling_layer": pooler} if FAMILY_TABLE[family].optional_pooler else {}
    auto: Any = transformers.AutoModel
    model = auto.from_config(config, **pooling)
    return LoadedEncoder(Encoder(model.eval()), tiny_tokenizer(family), f"tiny-{family}", "0" * 64)


def save_tiny_encoder(folder: Path, family: str = "bert", *, seed: int = 0, **options: Any) -> Path:
    """Write a tiny encoder to a folder, as transformers does, and return the folder."""
    loaded = tiny_encoder(family, seed=seed, **options)
    loaded.encoder.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


_folders = tempfile.TemporaryDirectory(prefix="lamella-testing-")  # removed when Python ends


@functools.cache
def saved_encoder(family: str) -> Path:
    """Return the folder of a tiny encoder that is written once; no check changes it."""
    return save_tiny_encoder(Path(_folders.name) / family, family)


def tiny_run_config(**sections: Any) -> RunConfig:
    """Return the options of a run whose windows fit the tiny encoders."""
    windows = {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24}
    return check_config({"windows": windows, **sections}, where="tests")


def tiny_batch(family: str = "bert", count: int = 4, *, characters: int = 60) -> Batch:
    """Return windows of different lengths over the bundled contexts, so that all but the longest are padded.

    The context of window i has `characters` · (i + 1) characters.
    """
    texts = [context[: characters * (number + 1)] for number, context in enumerate(corpus()[:count])]
    examples = [
        Example(id=f"q{number}", question="What is it?", context=Context(text)) for number, text in enumerate(texts)
    ]
    features = featurise(examples, tiny_tokenizer(family), tiny_run_config().windows)
    return collate(features, np.arange(len(features)))


def tiny_config(family: str, **options: Any) -> Any:
    """Return the configuration of an encoder with a few thousand parameters."""
    sizes: dict[str, Any] = {
        "vocab_size": 1000,
        "hidden_size": HIDDEN,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 130,
    }
    if family == "distilbert":
        sizes = {"vocab_size": 1000, "dim": HIDDEN, "n_layers": DEPTH, "n_heads": 4, "hidden_dim": 48,
                 "max_position_embeddings": 130}  # fmt: skip
    if family in ("albert", "electra"):
        sizes["embedding_size"] = 16
    if family == "deberta-v2":  # as DeBERTa-v3, but with so few buckets that distances share them
        sizes |= {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"],
                  "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
                  "type_vocab_size": 0}  # fmt: skip
    if family in ("eurobert", "modernbert"):  # with small weights, the sum with the input of a layer hides its output
        sizes["initializer_range"] = 0.2
    if family == "eurobert":
        sizes |= {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
                  "mask_token_id": 2}  # fmt: skip
    if family == "modernbert":  # the middle one of the three layers sees 8 tokens on either side
        sizes |= {"local_attention": 16, "global_attn_every_n_layers": 2, "pad_token_id": 0, "bos_token_id": 2,
                  "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}  # fmt: skip
    return transformers.AutoConfig.for_model(family, **{**sizes, **options})


def corpus() -> list[str]:
    """Return text to learn small vocabularies from: the bundled contexts and some awkward characters."""
    return [*_contexts(), AWKWARD]


@functools.cache
def _contexts() -> tuple[str, ...]:
    document = json.loads(data_path("demo:train").read_text(encoding="utf-8"))
    return tuple(paragraph["context"] for article in document["data"] for paragraph in article["paragraphs"])


@functools.cache
def tiny_tokenizer(family: str) -> Any:
    """Return a tokenizer of the family's own class and pipeline, with a small vocabulary from the bundled text."""
    if family in ("bert", "electra", "distilbert", "mpnet"):
        special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"] if family == "mpnet" else None
        special = special or ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        vocabulary = {piece: number for number, piece in enumerate([*special, *_word_pieces()])}
        kinds: dict[str, Any] = {"mpnet": transformers.MPNetTokenizer, "distilbert": transformers.DistilBertTokenizer}
        return kinds.get(family, transformers.BertTokenizer)(vocab=vocabulary)
    if family in ("eurobert", "modernbert", "roberta"):
        return _byte_pair_tokenizer(family)
    return _unigram_tokenizer(family)


def _byte_pair_tokenizer(family: str) -> Any:
    special = {
        "eurobert": ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"],
        "modernbert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        "roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    }[family]
    trained: Any = Tokenizer(models.BPE())
    trained.normalizer = normalizers.NFC() if family == "modernbert" else None
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(corpus(), trainer)
    if family == "roberta":
        model = json.loads(trained.to_str())["model"]
        kind: Any = transformers.RobertaTokenizer
        return kind(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    # These two have no class of their own: everything is in tokenizer.json.
    first, last = ("[CLS]", "[SEP]") if family == "modernbert" else special[:2]
    trained.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, trained.token_to_id(token)) for token in (first, last)],
    )
    fast: Any = transformers.PreTrainedTokenizerFast
    if family == "modernbert":
        trained.add_tokens([AddedToken(" " * count, normalized=True) for count in (4, 3, 2)])
        return fast(
            tokenizer_object=trained,
            model_input_names=["input_ids", "attention_mask"],
            cls_token=first,
            sep_token=last,
            pad_token="[PAD]",
            unk_token="[UNK]",
            mask_token="[MASK]",
        )
    return fast(tokenizer_object=trained, bos_token=first, eos_token=last, cls_token=first, pad_token=last)


def _unigram_tokenizer(family: str) -> Any:
    kind: Any
    kind, special, unknown = {
        "albert": (transformers.AlbertTokenizer, ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"], "<unk>"),
        "deberta-v2": (transformers.DebertaV2Tokenizer, ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"], "[UNK]"),
        "xlm-roberta": (transformers.XLMRobertaTokenizer, ["<s>", "<pad>", "</s>", "<unk>"], "<unk>"),
    }[family]
    trained: Any = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=700, special_tokens=special, unk_token=unknown, show_progress=False)
    trained.train_from_iterator([text.lower() for text in corpus()] if family == "albert" else corpus(), trainer)
    return kind(vocab=[tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]])


def _word_pieces() -> list[str]:
    """Return frequent words and all characters; in a fixed order, unlike a trained vocabulary."""
    words = Counter(re.findall(r"\w+", " ".join(corpus()).lower()))
    characters = sorted({character for text in corpus() for character in unicodedata.normalize("NFD", text.lower())})
    frequent = sorted(word for word, count in words.items() if count >= 4 and len(word) > 1)
    return [*characters, *(f"##{character}" for character in characters), *frequent]
