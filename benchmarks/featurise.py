"""Time cutting a data set into labelled windows, against the method of transformers' question-answering example.

    python benchmarks/featurise.py [--quick] [--out featurise.json]

The peer passes questions and contexts to the tokenizer in pairs, a thousand at a time; the tokenizer truncates, strides
and pads them to the maximum. Then it walks through the windows and finds the tokens of the answer by their offsets. The
rest of the example (a data set on disk, several processes) is left out. Both read the CS224n half of the SQuAD 2.0 dev
set if it is beside the checkout, else the bundled set, repeated, with the tokenizer of all-MiniLM-L6-v2.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers

from lamella.config import DEFAULT_ENCODER, WindowOptions
from lamella.data.demo import data_path
from lamella.data.examples import Answer, Context, Example
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.tokens import without_truncation
from lamella.encoder.pretrained import load_tokenizer
from lamella.encoder.sources import find_encoder
from lamella.files import write_json
from lamella.version import __version__

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "cs224n-dev.json.gz"
WINDOWS = WindowOptions(max_seq_length=384, doc_stride=128)
CHUNK = 1000  # the batch size of `datasets.map`, which the example leaves at its default


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="the first 1,500 questions, 5 repeats")
    arguments.add_argument("--out", type=Path, help="write the numbers to this json file")
    options = arguments.parse_args()
    count, repeats = (1500, 5) if options.quick else (6078, 7)

    examples, data = questions(count)
    tokenizer = load_tokenizer(find_encoder(DEFAULT_ENCODER))
    agree(featurise(examples, tokenizer, WINDOWS), in_pairs(examples, tokenizer))
    pairs = [
        (
            seconds(lambda: featurise(examples, tokenizer, WINDOWS)),
            seconds(lambda: in_pairs(examples, tokenizer)),
        )
        for _ in range(repeats)  # in turn, so that load affects both alike
    ]
    ratios = [peer / ours for ours, peer in pairs]
    result = {
        "data": data,
        "questions": len(examples),
        "contexts": len({id(example.context) for example in examples}),
        "repeats": repeats,
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": statistics.median(ours for ours, _ in pairs),
        "peer": statistics.median(peer for _, peer in pairs),
        "unit": "s",
        "work": {
            "seconds": min(seconds(lambda: tokenize(examples, tokenizer)) for _ in range(repeats)),
            "of": "the tokenizers library alone, once per text",
        },
        "versions": {
            "lamella": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "transformers": transformers.__version__,
        },
    }
    if options.out:
        write_json(options.out, result)
    print(
        f"{len(examples)} questions about {result['contexts']} contexts of {data}, {repeats} repeats: "
        f"{result['ours']:.2f} s ours, {result['peer']:.2f} s in pairs"
    )
    print(f"featurise: {result['ratio']:.1f} x as fast ({min(ratios):.1f} to {max(ratios):.1f})")


def tokenize(examples: Sequence[Example], tokenizer: Any) -> None:
    """Tokenize every different text once, and do nothing else."""
    plain = without_truncation(tokenizer)
    for texts in ({example.context.text for example in examples}, {example.question for example in examples}):
        plain.encode_batch(list(texts), add_special_tokens=False)


def questions(count: int) -> tuple[list[Example], str]:
    """Return the first `count` questions and the name of their file."""
    if REAL.is_file():
        return in_squad_format(json.loads(gzip.decompress(REAL.read_bytes())), "")[:count], REAL.name
    bundled = json.loads(data_path("demo:train").read_text(encoding="utf-8"))
    examples: list[Example] = []
    while len(examples) < count:  # a different ending each time, so that no text is tokenized only once
        examples += in_squad_format(bundled, f" {len(examples)}")
    return examples[:count], "the bundled set, repeated"


def in_squad_format(document: Any, ending: str) -> list[Example]:
    examples = []
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            context = Context(paragraph["context"] + ending)
            for qa in paragraph["qas"]:
                answers = tuple(Answer(answer["text"], answer["answer_start"]) for answer in qa["answers"])
                examples.append(Example(qa["id"], qa["question"], context, answers))
    return examples


def in_pairs(examples: Sequence[Example], tokenizer: Any) -> list[dict[str, Any]]:
    """Do as the peer: tokenize every question with its context, then label window by window."""
    chunks = []
    for at in range(0, len(examples), CHUNK):
        chunk = examples[at : at + CHUNK]
        encoded = tokenizer(
            [example.question.lstrip() for example in chunk],
            [example.context.text for example in chunk],
            truncation="only_second",
            max_length=WINDOWS.max_seq_length,
            stride=WINDOWS.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )
        owners = encoded.pop("overflow_to_sample_mapping")
        all_offsets = encoded.pop("offset_mapping")
        starts, ends = [], []
        for window, offsets in enumerate(all_offsets):
            ids = encoded["input_ids"][window]
            cls = ids.index(tokenizer.cls_token_id)
            start, end = label(chunk[owners[window]], offsets, encoded.sequence_ids(window), cls)
            starts.append(start)
            ends.append(end)
        chunks.append({**encoded, "start_positions": starts, "end_positions": ends})
    return chunks


def label(example: Example, offsets: list[tuple[int, int]], sides: list[int | None], cls: int) -> tuple[int, int]:
    """Find the tokens of the answer, walking inwards from both ends of the context."""
    if not example.answers:
        return cls, cls
    answer = example.answers[0]
    first, last = 0, len(sides) - 1
    while sides[first] != 1:
        first += 1
    while sides[last] != 1:
        last -= 1
    if offsets[first][0] > answer.begin_char or offsets[last][1] < answer.end_char:
        return cls, cls
    start, end = first, last
    while start <= last and offsets[start][0] <= answer.begin_char:
        start += 1
    while end >= first and offsets[end][1] >= answer.end_char:
        end -= 1
    return start - 1, end + 1


def agree(ours: Features, peer: list[dict[str, Any]]) -> None:
    """Check for the same windows, token by token, and the same labels: a faster wrong answer is no result."""
    window = 0
    for chunk in peer:
        for ids, mask, start, end in zip(
            chunk["input_ids"], chunk["attention_mask"], chunk["start_positions"], chunk["end_positions"], strict=True
        ):
            if ours.input_ids[ours.rows[window] : ours.rows[window + 1]].tolist() != ids[: sum(mask)]:
                raise SystemExit(f"window {window} differs in its tokens")
            if (int(ours.start[window]), int(ours.end[window])) != (start, end):
                label_of_ours = int(ours.start[window]), int(ours.end[window])
                raise SystemExit(f"window {window} differs in its label: {label_of_ours} ours, {(start, end)} in pairs")
            window += 1
    if window != len(ours):
        raise SystemExit(f"{len(ours)} windows ours, {window} in pairs")


def seconds(work: Callable[[], object]) -> float:
    gc.collect()  # neither pays for the garbage of the other
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
