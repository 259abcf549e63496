"""The section of a model card about the data that a model was trained on."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.models.facts import AveragedFacts, DataFacts, Facts

MIXTURE = ("train file", "questions", "weight", "negatives", "taken per epoch", "of these unanswerable")
NOTE = (
    "Negatives are questions with a context of the same file that resembles theirs and does not contain the answer, "
    "drawn again every epoch."
)


def data_section(facts: Facts) -> str:
    """Describe the data of a model, or those of each model that it is the mean of if they differ."""
    members = [] if facts.train else [model for part in facts.mean_of for model in part.trained()]
    splits = [(f"train of `{member.model}`", member.train) for member in members] or [("train", facts.train)]
    rows = [
        f"| {split} | {_files(data)} | {data.questions:,} | {data.unanswerable:,} |"
        for split, data in (*splits, ("dev", facts.dev))
        if data is not None
    ]
    if not rows:
        return "Not recorded."
    table = ["| split | files | questions | unanswerable |", "|---|---|---:|---:|", *rows]
    return "\n".join([*table, *_fractions(facts, members), *_mixtures(facts, members)])


def _files(data: DataFacts) -> str:
    """Name the files of a data set, with their licences."""
    licences = data.licences or [None] * len(data.files)
    named = zip(data.files, licences, strict=True)
    return ", ".join(f"`{file}` ({licence})" if licence else f"`{file}`" for file, licence in named)


def _fractions(facts: Facts, members: Sequence[AveragedFacts]) -> list[str]:
    named = [(f"`{member.model}` was trained", member.fraction) for member in members]
    shares = [
        f"{who} on {100 * fraction:g} % of the train questions."
        for who, fraction in named or [("Trained", facts.fraction)]
        if fraction < 1
    ]
    return ["", *shares] if shares else []


def _mixtures(facts: Facts, members: Sequence[AveragedFacts]) -> list[str]:
    """Describe what an epoch took of each training file."""
    mixtures = [(f"| `{member.model}` ", member.mixture) for member in members] or [("", facts.mixture)]
    rows = [
        f"{model}| `{share.file}` | {share.questions:,} | {share.weight:g} | {share.negatives:g} | {share.taken:,} "
        f"({100 * share.taken / max(1, sum(each.taken for each in mixture)):.1f} %) | {share.unanswerable:,} |"
        for model, mixture in mixtures
        for share in mixture
    ]
    if not rows:
        return []
    model = "| model " if members else ""
    head = f"{model}| {' | '.join(MIXTURE)} |"
    return ["", head, f"{'|---' if members else ''}|---{5 * '|---:'}|", *rows, "", NOTE]
