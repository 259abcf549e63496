"""The parts of the page that were measured on other machines, made from their own json files.

other_machines.json   what `auto` takes on each kind of processor, and what batches gain on many cores
gpu.json              answering and serving on a GPU; training is in results/speed.json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from suite.numbers import digits, missed, percent

Json = dict[str, Any]

PLAIN_GOAL = 0.8  # of the tokens per second of the plain encoder
GPU = """\
One {device} in {precision}. **Training**: full fine-tuning, `python benchmarks/train_speed.py --quick --device cuda`
([more columns](results/readers.md#speed-on-a-gpu)). *Of the limit*: the encoder's operations, as a share of the speed
of one large matrix product. *Of the plain encoder*: our tokens per second, without padding, as a share of those of
transformers' model in bf16, forward and backward on full windows of 384 tokens with the same batch size, without head,
loss and optimiser. The goal is {goal}."""


def processors(kinds: Sequence[Json], limits: Json, others: Sequence[Json]) -> str:
    """Return what `auto` takes on each kind of processor, and where the numbers are; `others` are other machines'."""
    lines = _processors(kinds, limits, others)
    return "\n".join(["Which of them `auto` takes is decided per kind of processor:", "", *lines])


def _processors(kinds: Sequence[Json], limits: Json, others: Sequence[Json]) -> Iterator[str]:
    for kind in kinds:
        name = f"**{kind['name']}**" + (f" ({kind['such_as']})" if kind["such_as"] else "")
        here = fits(kind, limits)
        numbers = ["The table above has the numbers."] if here else []
        if any(fits(kind, other) for other in others):
            numbers.append(f"The numbers are under [{section(kind)}](#{anchor(section(kind))}).")
        if kind["per_second"] and not here:
            measured = ", ".join(f"{way} {_range(rates)}" for way, rates in kind["per_second"].items())
            numbers.append(f"Questions per second, measured elsewhere: {measured} ([why]({kind['source']})).")
        numbers = numbers or ["Not measured."]
        yield " ".join(filter(None, (f"- {name}: `auto` takes {kind['auto']}.", *numbers, kind["why"])))


def section(kind: Json) -> str:
    """Return the heading of the results of a kind of machine."""
    return f"Results on {kind['name']}"


def anchor(heading: str) -> str:
    """Return the place of a heading in a page, as GitHub names it."""
    return heading.lower().replace(",", "").replace(" ", "-")


def fits(kind: Json, limits: Json) -> bool:
    """Return whether a machine with these limits is of a kind."""
    found = limits["instructions"]
    has = not kind["has"] or kind["has"] in found
    return limits["machine"] == kind["machine"] and has and kind["lacks"] not in found


def _range(rates: Sequence[float]) -> str:
    low, high = (f"{rate:.0f}" for rate in rates)
    return low if low == high else f"{low} to {high}"


def batching(found: Json) -> str:
    """Return what batches gain on the cores of a machine."""
    low, high = found["spread"]
    goal = float(found["goal"].split()[-2])  # "at least 1.25 x"
    verdict = "met" if found["ratio"] >= goal else f"**{missed(found['ratio'], goal)}**"
    return (
        f"Batches give {found['clients']} clients {found['ratio']:.2f} times the answers of a server that computes one "
        f"request at a time ({low:.2f} to {high:.2f}), of a goal of {goal:g}: {verdict}."
    )


def many_cores(found: Json) -> str:
    """Return what batches gain on many cores."""
    return (
        "On few cores batches can gain little where a single window runs on all of them, too. On "
        f"{found['cores']} cores ({found['machine']}) it was {found['ratio']:.1f} times ([52]({found['source']}))."
    )


def gpu(facts: Json, training: Sequence[Json]) -> Iterator[str]:
    """Yield the section about a GPU: training, answering, serving."""
    yield GPU.format(device=facts["device"], precision=facts["precision"], goal=percent(PLAIN_GOAL))
    yield on_a_gpu(training)
    yield references(facts, training)
    yield answering(facts["answering"])
    yield serving(facts["server"])


def on_a_gpu(rows: Sequence[Json]) -> str:
    """Return the speed of training on a GPU beside its goal, where both are measured."""
    heads = ["encoder", "batch size", "`training.compile`", "windows/s", "times `Trainer`", "of the limit"]
    lines = [f"| {' | '.join(heads)} | plain encoder, tokens/s | of the plain encoder |"]
    lines.append("|---|---:|---|---:|---:|---:|---:|---|")
    for row in rows:
        if (share := row.get("share_of_plain")) is None:
            continue
        low, high = map(digits, row["spread"])
        verdict = "met" if share >= PLAIN_GOAL else f"**{missed(share, PLAIN_GOAL)}**"
        cells = [row["encoder"], str(row["batch_size"]), "yes" if row["compile"] else "no", digits(row["ours"])]
        cells += [f"{digits(row['ratio'])} ({low} to {high})", percent(row["share_of_limit"]["ours"])]
        cells += [f"{row['plain_tokens_per_second'] / 1e6:.2f} million", f"{percent(share)}: {verdict}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def references(facts: Json, rows: Sequence[Json]) -> str:
    """Return how the verdicts depend on the plain encoder that is compared with, and why a goal is missed."""
    profile = facts["profile"]
    small = [row for row in rows if row.get("share_of_plain") and row["encoder"].endswith("MiniLM-L6-v2")]
    compiled = {row["batch_size"]: row for row in small if row["compile"]}
    few, many = compiled[min(compiled)], compiled[max(compiled)]
    fastest = max(row["plain_tokens_per_second"] for row in small)
    first = facts["goal_tokens_per_second"]
    return (
        f"The goal depends on the plain encoder. For MiniLM it runs {few['plain_tokens_per_second'] / 1e6:.2f} million "
        f"tokens per second in batches of {few['batch_size']}, and up to {fastest / 1e6:.2f} million in batches of "
        f"{many['batch_size']}. Against the latter, our compiled batches of {few['batch_size']} reach "
        f"{percent(_tokens(few) / fastest)} instead of {percent(few['share_of_plain'])}. When the goal was set, "
        f"{first / 1e6:.1f} million were measured; of these, our compiled batches of {many['batch_size']} reach "
        f"{percent(_tokens(many) / first)}. Without compiling, the goal is missed because of the work between the "
        f"products: a profile of a step of {profile['encoder']} shows {percent(profile['attention'])} of the time in "
        "attention, and half of the rest in casts, sums of gradients, LayerNorms and dropout "
        f"([60]({profile['source']})). Compiling joins these."
    )


def _tokens(row: Json) -> float:
    return float(row["ours"] * row["mean_length"])


def answering(facts: Json) -> str:
    """Return the time of a batch beside its goal."""
    goal = facts["goal"]
    lines = [
        "**Answering**: milliseconds per batch, launched one kernel after the other, and recorded "
        f"([60]({facts['source']})). The goal is {goal} times the speed. Large batches miss it: they keep the GPU busy "
        "without recorded passes, too.",
        "",
        "| encoder | windows × tokens | one kernel after the other | recorded | times as fast | goal |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in facts["rows"]:
        ratio = row["before"] / row["ours"]
        verdict = "met" if ratio >= goal else f"**{missed(ratio, goal)}**"
        size = f"{row['windows']} × {row['tokens']}"
        lines.append(f"| {row['encoder']} | {size} | {row['before']} | {row['ours']} | {ratio:.1f} | {verdict} |")
    return "\n".join(lines)


def serving(facts: Json) -> str:
    """Return the answers per second of a server beside its goal."""
    goal = facts["goal"]
    lines = [
        f"**Serving** {facts['clients']} clients: answers per second, against a server that computes one question at a "
        f"time. The goal is {goal} times as many. The process around the encoder is the limit: HTTP, cutting and "
        "decoding share the interpreter's lock. What makes a pass cheaper helps single questions as much as batches "
        f"([63]({facts['source']})).",
        "",
        "| reader | encoder | answers/s | one at a time | times as many | goal |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in facts["rows"]:
        low, high = row["spread"]
        verdict = "met" if row["ratio"] >= goal else f"**{missed(row['ratio'], goal)}**"
        ratio = f"{row['ratio']:.1f} ({low:.1f} to {high:.1f})"
        cells = [f"`{row['reader']}`", row["encoder"], digits(row["ours"]), digits(row["peer"]), ratio, verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
