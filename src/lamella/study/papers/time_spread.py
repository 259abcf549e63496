"""How much times of the same work vary, by what was timed more than once."""

from __future__ import annotations

import json
from collections.abc import Iterable

from lamella.study.reader_options import reader_options
from lamella.study.records import RunRecord, is_number

TIMES = ("train_seconds", "inference_seconds_per_1000")
NETWORK = ("total_parameters", "inference_flops_per_window", "inference_batch_size", "precision")


def time_spreads(records: Iterable[RunRecord]) -> dict[tuple[str, str | None], float]:
    """Return, by kind of time and device, the largest ratio between times of the same work.

    The same work: runs that differ only in their seeds and, for the time to answer, networks of the same size.
    """
    times: dict[tuple[str, str | None, str], list[float]] = {}
    for record in records:
        for key in TIMES:
            if is_number(record.cost.get(key)) and record.cost[key] > 0:
                times.setdefault((key, record.device, _work(record, key)), []).append(record.cost[key])
    spreads: dict[tuple[str, str | None], float] = {}
    for (key, device, _), of_work in times.items():
        spreads[key, device] = max(spreads.get((key, device), 1.0), max(of_work) / min(of_work))
    return spreads


def _work(record: RunRecord, key: str) -> str:
    network = [record.cost.get(fact) for fact in NETWORK]
    if key != "train_seconds" and None not in network:
        return json.dumps(network)
    return json.dumps(reader_options(record.options), sort_keys=True) if record.config else str(record.folder)
