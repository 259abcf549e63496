"""Time decoding logits into n-best lists, against a loop like the one in `run_qa.py`.

    python benchmarks/decode.py [--quick] [--out decode.json]

Both get the logits of the same windows (random, with a few peaks each, over the bundled contexts) and return the 20
best answers of every question with texts and probabilities, and "no answer". The peer takes the 20 best starts and the
20 best ends of a window and tries all pairs; ours finds the best pairs directly. When the best starts and ends do not
combine, a pair of a mediocre start and a mediocre end can be among the best: the script counts how often the peer
misses one.
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

from lamella.config import DEFAULT_ENCODER, WindowOptions
from lamella.data.dataset import load_examples
from lamella.data.examples import Example
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.padding import Padded, longest_first, pad
from lamella.decoding_options import DecodingOptions
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
Places = list[Any]  # per token of a window: begin and end in characters, or None


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
        for _ in range(repeats)  # in turn, so that load affects both alike
    ]
    ratios = [its / mine for mine, its in pairs]
    result = {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": statistics.median(mine for mine, _ in pairs),
        "peer": statistics.median(its for _, its in pairs),
        "unit": "s",
        "work": {"bytes": sum(logits.nbytes for _, logits in batches), "of": "read the logits once"},
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
        f"miss one of the 20 best in {missed:.1%} of the lists and the best one in {worse:.1%}"
    )
    print(f"decode: {result['ratio']:.1f} x as fast ({min(ratios):.1f} to {max(ratios):.1f})")


def with_decoder(features: Features, batches: Batches) -> dict[str, Prediction]:
    merger = WindowMerger(OPTIONS)
    for padded, logits in batches:
        merger.add(features, decode(logits, padded, OPTIONS))
    return merger.predictions(features.examples)


def with_loops(features: Features, batches: Batches, places_of: list[Places]) -> dict[str, list[dict[str, Any]]]:
    """Decode window by window and pair by pair, with the checks and records of such a loop."""
    candidates: dict[str, list[dict[str, Any]]] = {example.id: [] for example in features.examples}
    nulls: dict[str, float] = {}
    for padded, logits in batches:
        for row, window in enumerate(padded.windows):
            example = features.examples[features.example[window]]
            start, end = logits[:, row]
            null = float(start[padded.cls] + end[padded.cls])
            nulls[example.id] = min(nulls.get(example.id, null), null)
            places = places_of[window]
            starts, ends = (np.argsort(scores)[-1 : -OPTIONS.n_best_size - 1 : -1].tolist() for scores in (start, end))
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
                    candidates[example.id].append(
                        {
                            "offsets": (places[first][0], places[last][1]),
                            "score": start[first] + end[last],
                            "start_logit": start[first],
                            "end_logit": end[last],
                        }
                    )
    lists = {}
    for example in features.examples:
        best = sorted(candidates[example.id], key=lambda candidate: candidate["score"], reverse=True)[
            : OPTIONS.n_best_size
        ]
        best.append({"offsets": (0, 0), "score": nulls[example.id], "start_logit": 0.0, "end_logit": 0.0})
        for candidate in best:
            begin, end = candidate.pop("offsets")
            candidate["text"] = example.context.text[begin:end]
        scores = np.array([candidate["score"] for candidate in best])
        weights = np.exp(scores - np.max(scores))
        for candidate, probability in zip(best, weights / weights.sum(), strict=True):
            candidate["probability"] = probability
        lists[example.id] = [
            {key: value if isinstance(value, str) else float(value) for key, value in candidate.items()}
            for candidate in best
        ]
    return lists


def offsets_of(features: Features, window: int) -> Places:
    """Return the position of each token of a window in the context; None for tokens outside it."""
    begin, end = int(features.context_begin[window]), int(features.context_end[window])
    first = int(features.first_token[window])
    inside = features.offsets[features.example[window]][first : first + end - begin].tolist()
    return [None] * begin + [tuple(pair) for pair in inside] + [None]


def compare(ours: dict[str, Prediction], peer: dict[str, list[dict[str, Any]]]) -> tuple[float, float]:
    """Return the share of questions where the peer's list lacks one of the best spans, and where it lacks the best.

    Also check that ours always finds the peer's candidates, or better ones.
    """
    missed = worse = 0
    for id, prediction in ours.items():
        mine = [candidate.score for candidate in prediction.candidates if candidate.text]
        texts: dict[str, float] = {}
        for candidate in peer[id]:
            if text := candidate["text"]:
                texts[text] = max(candidate["score"], texts.get(text, -np.inf))
        its = sorted(texts.values(), reverse=True)
        if any(better > own + 1e-4 for better, own in zip(its, mine, strict=False)):
            raise SystemExit(f"question {id}: expected no better answer from the loops than from the decoder, got one")
        missed += any(own > other + 1e-4 for own, other in zip(mine, its, strict=False))
        worse += mine[0] > its[0] + 1e-4 if its else bool(mine)
    return missed / len(ours), worse / len(ours)


def windows(count: int) -> Features:
    """Return at least `count` windows, repeating the bundled questions."""
    tokenizer = load_tokenizer(find_encoder(DEFAULT_ENCODER))
    examples = load_examples(["demo:train"]).examples
    repeated = [
        Example(f"{example.id}-{number}", example.question, example.context)
        for number, example in zip(range(count), itertools.cycle(examples), strict=False)
    ]
    return featurise(repeated, tokenizer, WindowOptions())


def with_logits(features: Features) -> Batches:
    """Return noise with five peaks per window for starts and for ends."""
    generator = np.random.default_rng(0)
    batches = []
    for indices in longest_first(features.lengths, BATCH):
        padded = pad(features, indices)
        logits = generator.normal(0, 1, (2, *padded.mask.shape)).astype(np.float32)
        places = generator.integers(0, padded.mask.shape[1], (2, len(indices), 5))
        np.put_along_axis(logits, places, generator.normal(5, 2, places.shape).astype(np.float32), axis=2)
        batches.append((padded, logits))
    return batches


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
