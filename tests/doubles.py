"""Small stand-ins: tiny random encoders of every family with real tokenizers, and models that know the answer."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from lamella.config import RunConfig
from lamella.data.batches import Batch, collate
from lamella.data.demo import data_path
from lamella.data.examples import Answer, Context, Example
from lamella.data.features import featurise
from lamella.encoder.encoder import Encoder
from lamella.encoder.pretrained import LoadedEncoder
from lamella.models.model import ReaderModel
from lamella.validation import check_config

FAMILIES = ("albert", "bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")
HIDDEN, DEPTH = 32, 3
AWKWARD = (
    "Cafe\u0301 Zoë naïve 서울은 한국의 수도 東京は日本 القاهرة مدينة שלום עולם 👩‍🚀 went 🇫🇷 to the 👍🏽 "
    "“moon” — at 3.5°C नमस्ते दुनिया e\u0301\u0327te\u0301"
)


def corpus() -> list[str]:
    """Text to learn small vocabularies from: the bundled contexts and some awkward characters."""
    document = json.loads(data_path("demo:train").read_text(encoding="utf-8"))
    contexts = [paragraph["context"] for article in document["data"] for paragraph in article["paragraphs"]]
    return [*contexts, AWKWARD]


@functools.cache
def tiny_tokenizer(family: str) -> Any:
    """A tokenizer of the family's own class and pipeline, with a small vocabulary learnt from the bundled text."""
    if family in ("bert", "electra", "distilbert", "mpnet"):
        special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"] if family == "mpnet" else None
        special = special or ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        vocabulary = {piece: number for number, piece in enumerate([*special, *_word_pieces()])}
        kind = {"mpnet": transformers.MPNetTokenizer, "distilbert": transformers.DistilBertTokenizer}
        return kind.get(family, transformers.BertTokenizer)(vocab=vocabulary)
    if family == "roberta":
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        trained.train_from_iterator(corpus(), trainer)
        model = json.loads(trained.to_str())["model"]
        merges = [tuple(merge) for merge in model["merges"]]
        return transformers.RobertaTokenizer(vocab=model["vocab"], merges=merges)
    special = (
        ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"] if family == "albert" else ["<s>", "<pad>", "</s>", "<unk>"]
    )
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=700, special_tokens=special, unk_token="<unk>", show_progress=False)
    trained.train_from_iterator([text.lower() for text in corpus()] if family == "albert" else corpus(), trainer)
    vocab = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    kind = transformers.AlbertTokenizer if family == "albert" else transformers.XLMRobertaTokenizer
    return kind(vocab=vocab)


def _word_pieces() -> list[str]:
    """Whole words that occur often, and all characters; in a fixed order, which a trained vocabulary does not have."""
    words = Counter(re.findall(r"\w+", " ".join(corpus()).lower()))
    characters = sorted({character for text in corpus() for character in unicodedata.normalize("NFD", text.lower())})
    frequent = sorted(word for word, count in words.items() if count >= 4 and len(word) > 1)
    return [*characters, *(f"##{character}" for character in characters), *frequent]


def tiny_config(family: str, **options: Any) -> Any:
    """A configuration of a few thousand parameters."""
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
    return transformers.AutoConfig.for_model(family, **{**sizes, **options})


def tiny_encoder(family: str = "bert", *, seed: int = 0, pooler: bool = False, **options: Any) -> LoadedEncoder:
    """A random encoder of the family, in evaluation mode, that needs no file."""
    torch.manual_seed(seed)
    config = tiny_config(family, **options)
    extra = {} if family in ("distilbert", "electra") else {"add_pooling_layer": pooler}
    model = transformers.AutoModel.from_config(config, **extra)
    return LoadedEncoder(Encoder(model.eval()), tiny_tokenizer(family), f"tiny-{family}", "0" * 64)


def save_tiny_encoder(folder: Path, family: str = "bert", *, seed: int = 0, **options: Any) -> Path:
    """The same as a folder, as transformers writes it."""
    loaded = tiny_encoder(family, seed=seed, **options)
    loaded.encoder.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def tiny_run_config(**sections: Any) -> RunConfig:
    """A run configuration whose windows fit the tiny encoders."""
    windows = {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24}
    return check_config({"windows": windows, **sections}, where="tests")


def tiny_model(family: str = "bert", *, seed: int = 0, dropout: bool = True, **sections: Any) -> ReaderModel:
    """A random reader."""
    options = {} if dropout else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ReaderModel(tiny_encoder(family, seed=seed, **options), tiny_run_config(**sections)).eval()


def tiny_batch(family: str = "bert", count: int = 4) -> Batch:
    """Windows of unlike length over the bundled contexts, so that most of them are padded."""
    texts = [context[: 60 * (number + 1)] for number, context in enumerate(corpus()[:count])]
    features = featurise(examples_about(texts), tiny_tokenizer(family), tiny_run_config().windows)
    return collate(features, np.arange(len(features)))


def example(context: str, answer: str | None = None, question: str = "What is it?", id: str = "q1") -> Example:
    """An example whose answer is found in the context."""
    answers = () if answer is None else (Answer(answer, context.index(answer)),)
    return Example(id=id, question=question, context=Context(context), answers=answers)


def examples_about(contexts: Sequence[str]) -> list[Example]:
    """One unanswerable example for each context."""
    return [example(text, id=f"q{number}") for number, text in enumerate(contexts)]
