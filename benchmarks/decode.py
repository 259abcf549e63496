"""How long it takes to make n-best lists of logits, beside a loop of the kind that `run_qa.py` goes through.

    python benchmarks/decode.py [--quick] [--out decode.json]

Both are given the logits of the same windows (random ones, with a few high places each, over the bundled contexts) and
give the 20 best answers of every question with their texts and probabilities, and "no answer". The peer takes the 20
best starts and the 20 best ends of a window and tries all pairs; ours finds the best pairs themselves. A pair of a
middling start with a middling end can be among the best of a window when the best starts and ends do not go together:
how often the peer misses one is counted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.config import DEFAULT_ENCODER, DecodingOptions, WindowOptions
from lamella.data.dataset import load_examples
from lamella.data.examples import Example
from lamella.data.features import Features, featurise
from lamella.data.padding import Padded, longest_first, pad
from lamella.encoder.pretrained import load_tokenizer
from lamella.encoder.sources import find_encoder
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.inference.decode import decode
from lamella.inference.prediction import Prediction
from lamella.inference.window_merger import WindowMerger

OPTIONS = DecodingOptions(n_best_size=20, max_answer_length=30)
BATCH = 64

Batches = list[tuple[Padded, NDArray[np.float32]]]
Places = list[Any]  # of the tokens of a window: begin and end in characters, or nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,500 windows, 3 repeats")
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    arguments = parser.parse_args()
    count, repeats = (1500, 3) if arguments.quick else (12000, 5)

    features = windows(count)
    batches = with_logits(features)
    places = [offsets_of(features, window) for window in range(len(features))]
    ours, peer = with_decoder(features, batches), with_loops(features, batches, places)
    missed, worse = compare(ours, peer)
    pairs = [
        (seconds(lambda: with_decoder(features, batches)), seconds(lambda: with_loops(features, batches, places)))
        for _ in range(repeats)  # in turn, so that a busy moment touches both
    ]
    ratios = [its / mine for mine, its in pairs]
    result = {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": statistics.median(mine for mine, _ in pairs),
        "peer": statistics.median(its for _, its in pairs),
        "unit": "seconds",
        "windows": len(features),
        "repeats": repeats,
        "lists_the_peer_has_wrong": missed,
        "best_answers_the_peer_has_wrong": worse,
        "versions": library_versions(),
    }
    if arguments.out:
        write_json(arguments.out, result)
    print(
        f"{len(features)} windows, {repeats} repeats: {result['ours']:.2f} s ours, {result['peer']:.2f} s loops, which "
        f"miss one of the 20 best in {missed:.1%} of the lists and the very best in {worse:.1%}"
    )
    print(f"decode: {result['ratio']:.1f} x as fast ({min(ratios):.1f} to {max(ratios):.1f})")


def with_decoder(features: Features, batches: Batches) -> dict[str, Prediction]:
    merger = WindowMerger(OPTIONS)
    for padded, logits in batches:
        merger.add(features, decode(logits, padded, OPTIONS))
    return merger.predictions(features.examples)


def with_loops(features: Features, batches: Batches, places_of: list[Places]) -> dict[str, list[dict[str, Any]]]:
    """Window after window, pair after pair, with the checks and the records of such a loop."""
    found: dict[str, list[dict[str, Any]]] = {example.id: [] for example in features.examples}
    nulls: dict[str, float] = {}
    for padded, logits in batches:
        for row, window in enumerate(padded.windows):
            example = features.examples[features.example[window]]
            start, end = logits[:, row]
            null = float(start[padded.cls] + end[padded.cls])
            nulls[example.id] = min(nulls.get(example.id, null), null)
            places = places_of[window]
            starts, ends = (np.argsort(one)[-1 : -OPTIONS.n_best_size - 1 : -1].tolist() for one in (start, end))
            for first in starts:
                for last in ends:
                    if (
                        first >= len(places)
                        or last >= len(places)
                        or places[first] is None
                        or len(places[first]) < 2
                        or places[last] is None
                        or len(places[last]) < 2
                    ):
                        continue
                    if last < first or last - first + 1 > OPTIONS.max_answer_length:
                        continue
                    found[example.id].append(
                        {
                            "offsets": (places[first][0], places[last][1]),
                            "score": start[first] + end[last],
                            "start_logit": start[first],
                            "end_logit": end[last],
                        }
                    )
    lists = {}
    for example in features.examples:
        best = sorted(found[example.id], key=lambda one: one["score"], reverse=True)[: OPTIONS.n_best_size]
        best.append({"offsets": (0, 0), "score": nulls[example.id], "start_logit": 0.0, "end_logit": 0.0})
        for one in best:
            begin, end = one.pop("offsets")
            one["text"] = example.context.text[begin:end]
        scores = np.array([one["score"] for one in best])
        weights = np.exp(scores - np.max(scores))
        for one, probability in zip(best, weights / weights.sum(), strict=True):
            one["probability"] = probability
        lists[example.id] = [
            {key: value if isinstance(value, str) else float(value) for key, value in one.items()} for one in best
        ]
    return lists


def offsets_of(features: Features, window: int) -> Places:
    """Where each token of a window lies in the context, as such loops are given it: nothing for what is not context."""
    begin, end = int(features.context_begin[window]), int(features.context_end[window])
    first = int(features.first_token[window])
    inside = features.offsets[features.example[window]][first : first + end - begin].tolist()
    return [None] * begin + [tuple(pair) for pair in inside] + [None]


def compare(ours: dict[str, Prediction], peer: dict[str, list[dict[str, Any]]]) -> tuple[float, float]:
    """The share of questions where the peer's list lacks one of the best spans, and where it lacks the best of all.

    Whatever the peer finds, ours finds too, or a better one: that is checked.
    """
    missed = worse = 0
    for id, prediction in ours.items():
        mine = [one.score for one in prediction.candidates if one.text]
        texts: dict[str, float] = {}
        for one in peer[id]:
            if one["text"]:
                texts[one["text"]] = max(one["score"], texts.get(one["text"], -np.inf))
        its = sorted(texts.values(), reverse=True)
        if any(better > own + 1e-4 for better, own in zip(its, mine, strict=False)):
            raise SystemExit(f"question {id}: the loops found a better answer than the decoder did")
        missed += any(own > other + 1e-4 for own, other in zip(mine, its, strict=False))
        worse += mine[0] > its[0] + 1e-4 if its else bool(mine)
    return missed / len(ours), worse / len(ours)


def windows(count: int) -> Features:
    """So many windows of bundled questions, again and again."""
    tokenizer = load_tokenizer(find_encoder(DEFAULT_ENCODER))
    examples = load_examples(["demo:train"]).examples
    enough = [
        Example(f"{example.id}-{number}", example.question, example.context)
        for number, example in zip(range(count), itertools.cycle(examples), strict=False)
    ]
    return featurise(enough, tokenizer, WindowOptions())


def with_logits(features: Features) -> Batches:
    """Noise, and five high places a window for starts and for ends."""
    chance = np.random.default_rng(0)
    batches = []
    for indices in longest_first(features.lengths, BATCH):
        padded = pad(features, indices)
        logits = chance.normal(0, 1, (2, *padded.mask.shape)).astype(np.float32)
        places = chance.integers(0, padded.mask.shape[1], (2, len(indices), 5))
        np.put_along_axis(logits, places, chance.normal(5, 2, places.shape).astype(np.float32), axis=2)
        batches.append((padded, logits))
    return batches


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
