"""Commands about data and parts: check, convert, parts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamella.cli.app import AsJson, Encoding, OnBadAnswer, OverwriteFile, app, warn_of_unchecked_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lamella.config import RunConfig
    from lamella.data.doctor.problems import Problem
    from lamella.data.examples import Example
    from lamella.data.file_formats.formats import DataFile

LISTED = 20  # problems of each kind that `check` lists


@app.command()
def check(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Data files; demo:train and demo:dev are bundled. A run file (.toml) stands for its data files.",
        ),
    ],
    fix_to: Annotated[
        Path | None,
        typer.Option(
            "--fix-to", metavar="OUT", help="Write a fixed copy to this file; with several files, to this folder."
        ),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", hidden=True)] = False,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            metavar="NAME",
            help="Count tokens as this encoder does; default: that of a run file, or the bundled one, if installed.",
        ),
    ] = None,
    encoding: Encoding = None,
    list_all: Annotated[
        bool, typer.Option("--all", help=f"List every problem, instead of the first {LISTED} of each kind.")
    ] = False,
    overwrite: OverwriteFile = False,
    as_json: AsJson = False,
) -> None:
    """Find problems in data files; --fix-to writes fixed copies.

    For a run file with weights or negatives in data.train, also show what an epoch takes of each training file.

    Exit code: 0 if the files are clean, 1 if there are problems, 2 if a file cannot be read.
    """
    from lamella.data.doctor.checks import check as check_files
    from lamella.data.doctor.fixes import fix as fix_file
    from lamella.data.file_formats.formats import read
    from lamella.data.file_formats.writers import write
    from lamella.errors import UnreadableError, UsageError, counted, for_terminal

    if fix:  # it used to take the next word as its output, which could be a data file
        raise UsageError("check --fix: expected --fix-to OUT, the file to write the fixed copy to.")
    plans = [(name, config) for name in files if name.endswith(".toml") for config in _configs(name)]
    for name in dict.fromkeys(name for name, _ in plans):
        warn_of_unchecked_options(name)
    configs = [config for _, config in plans]
    named = [name for config in configs for split in ("train", "dev", "threshold") for name in config.data.files(split)]
    files = list(dict.fromkeys([*(name for name in files if not name.endswith(".toml")), *named]))
    if not files:
        run_files = ", ".join(dict.fromkeys(name for name, _ in plans))
        raise UsageError(f"{run_files}: expected data files, found none; set data.train or data.dev.")
    targets = _fix_targets(fix_to, files, overwrite)
    read_files, unreadable = [], []
    for name in files:
        try:
            read_files.append(read(name, encoding=encoding))
        except UnreadableError as error:
            unreadable.append(str(error))
    report = check_files(read_files, tokenizer=_counting_tokenizer(encoder, configs))
    mixtures = [
        {"run_file": name, **share}
        for name, config in plans
        if not unreadable
        for share in _mixture(config, read_files)
    ]
    if as_json:
        table = {**report.to_json(), "unreadable": unreadable, "mixture": mixtures}
        typer.echo(json.dumps(table, ensure_ascii=False, indent=2))
    else:
        for line in _listed(report.problems, limit=None if list_all else LISTED):
            typer.echo(line)
        for statistics in report.statistics:
            pairs = ""
            if statistics.pairs > statistics.questions:
                mean = statistics.pairs / statistics.questions
                pairs = f"; {mean:.1f} contexts per question, {statistics.unanswerable_pairs} of them without an answer"
            typer.echo(
                f"{statistics.file}: {statistics.format}, {counted(statistics.articles, 'article')}, "
                f"{counted(statistics.contexts, 'context')}, {counted(statistics.questions, 'question')} "
                f"({statistics.unanswerable} unanswerable){pairs}"
            )
        for share in mixtures:
            typer.echo(
                f"{share['file']}: weight {share['weight']:g}, negatives {share['negatives']:g}: an epoch takes "
                f"{share['taken']:,} questions ({share['percent']:.1f} %), {share['unanswerable']:,} without an answer"
            )
        kinds = Counter(f"{problem.severity} {problem.kind}" for problem in report.problems)
        if kinds or not unreadable:
            typer.echo(", ".join(f"{kind}: {count}" for kind, count in kinds.most_common()) or "no problems")
    for file in read_files if fix_to else []:
        fixed = fix_file(file, report.problems)
        target = targets[file.path]
        write(fixed.examples, target)
        dropped = len(file.examples) - len(fixed.examples) + file.unread
        typer.echo(
            f"{target}: {counted(fixed.fixed, 'problem')} fixed, {len(fixed.dropped)} not fixable, "
            f"{counted(dropped, 'question')} dropped",
            err=as_json,
        )
    for line in unreadable:
        typer.echo(f"lamella: {for_terminal(line)}", err=True)
    raise typer.Exit(2 if unreadable else 0 if report.clean else 1)


def _listed(problems: Sequence[Problem], limit: int | None) -> Iterator[str]:
    """Yield a line per problem; beyond the limit for each kind in a file, a line that counts the others."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for problem in problems:
        kind = problem.file, problem.severity, problem.kind
        seen[kind] += 1
        if limit is None or seen[kind] <= limit:
            yield str(problem)
    for (file, severity, name), count in seen.items():
        if limit is not None and count > limit:
            yield f"{file}: {count - limit:,} more: {severity} {name}; --all lists them"


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A data file in any known format.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write: .jsonl is flat, .json is SQuAD 2.0.")
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FORMAT", help="The format to write (see `lamella parts writer`)."),
    ] = None,
    negatives: Annotated[
        float | None,
        typer.Option(
            "--negatives",
            metavar="SHARE",
            min=0,
            max=1,
            help="Give this share of the answerable questions another context of the file, which resembles theirs and "
            "does not contain the answer.",
        ),
    ] = None,
    multi_context: Annotated[
        int | None,
        typer.Option(
            "--multi-context",
            metavar="N",
            min=2,
            help="Give each question N contexts, ordered as a search would rank them: its own, and those of the file "
            "that resemble the question and do not contain the answer.",
        ),
    ] = None,
    lengthen: Annotated[
        int | None,
        typer.Option(
            "--lengthen",
            metavar="CHARACTERS",
            min=1,
            help="Put the context of each question among others of the file without its answer, up to this length.",
        ),
    ] = None,
    hold_out: Annotated[
        float | None,
        typer.Option(
            "--hold-out",
            metavar="SHARE",
            min=0,
            max=1,
            help="Write whole articles with about this share of the questions to --hold-out-to instead of OUT.",
        ),
    ] = None,
    hold_out_to: Annotated[
        Path | None, typer.Option("--hold-out-to", metavar="FILE", help="With --hold-out: the file for these articles.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Chooses the questions, contexts or articles of the options above.")
    ] = 0,
    on_bad_answer: OnBadAnswer = "refuse",
    encoding: Encoding = None,
    overwrite: OverwriteFile = False,
) -> None:
    """Convert a data file to another format.

    With --multi-context, the contexts of question q have the ids q#0, q#1 and so on; a question that has several
    contexts keeps N of them, those with an answer first. --negatives is then the share of the answerable questions that
    keep no context with an answer.

    With --negatives alone, every question has one context, and the ids of the changed questions end in "-negative".
    With --lengthen, ids end in "-long", and answers move with their contexts; every question needs a single context,
    which --negatives gives it. With --hold-out, no article and no context is in both files.
    """
    from lamella.data.dataset import load_examples
    from lamella.data.file_formats.writers import checked_format, write
    from lamella.errors import UsageError, counted
    from lamella.files import check_output_file

    if multi_context is not None and lengthen is not None:
        raise UsageError("convert --multi-context: cannot be combined with --lengthen.")
    if (hold_out is None) != (hold_out_to is None):
        raise UsageError("convert: --hold-out and --hold-out-to need each other.")
    for output in [target, *([hold_out_to] if hold_out_to is not None else [])]:
        check_output_file(output, inputs=[source], overwrite=overwrite)
        if to is None:
            checked_format(output)
    if hold_out_to is not None and hold_out_to.resolve() == target.resolve():
        raise UsageError(f"convert --hold-out-to {hold_out_to}: expected another file than OUT.")
    dataset = load_examples([source], on_bad_answer=on_bad_answer or "refuse", encoding=encoding)
    if any(problem.kind == "unlabelled" for file in dataset.files for problem in file.problems):
        reason = "questions with neither answers nor is_impossible are written as unanswerable"
        typer.echo(f"warning: {source}: {reason}; use them for predictions only.", err=True)
    outputs: list[tuple[Path, Sequence[Example]]] = [(target, dataset.examples)]
    if hold_out is not None and hold_out_to is not None:
        from lamella.data.hold_out import hold_out as split

        outputs = list(zip((target, hold_out_to), split(dataset.examples, hold_out, seed=seed), strict=True))
        for path, examples in outputs:
            if not examples:
                raise UsageError(
                    f"convert --hold-out {hold_out:g}: expected articles for both files, got none for {path}; choose "
                    "another share, or data with more articles. Articles that share a context stay together: split "
                    "before --multi-context."
                )
    for path, examples in outputs:
        note, lost_answers, impossible = "", {}, 0
        if negatives is not None and multi_context is None:
            from lamella.data.negatives import with_negatives

            mixed = with_negatives(examples, negatives, seed=seed)
            examples, lost_answers, impossible = mixed.examples, mixed.lost_answers, mixed.impossible
            note = f", {counted(mixed.made, 'negative')}"
        if multi_context is not None:
            from lamella.data.multi_context import with_contexts

            made = with_contexts(examples, multi_context, negatives=negatives or 0.0, seed=seed)
            examples, impossible = made.examples, made.impossible
            note = f", {counted(len(examples), 'context')}"
            if made.short:
                note += f"; {counted(made.short, 'question')} with fewer than {multi_context}"
        if impossible:
            note += f"; {counted(impossible, 'question')} unchanged, as no other context lacks the answer"
        if lengthen is not None:
            from lamella.data.long_contexts import lengthen_contexts

            examples = lengthen_contexts(examples, lengthen, lost_answers=lost_answers, seed=seed)
            mean = sum(len(example.context.text) for example in examples) / max(1, len(examples))
            note += f", contexts of {mean:,.0f} characters on average"
        write(examples, path, format=to)
        questions = counted(len({example.question_id for example in examples}), "question")
        typer.echo(f"{path}: {questions} ({dataset.fixed} fixed, {dataset.skipped} skipped){note}")


@app.command()
def parts(
    family: Annotated[str | None, typer.Argument(metavar="FAMILY", help="List only this family.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the parts that a run file can name, with their options."""
    from lamella import registry
    from lamella.plugins import import_listed_plugins

    import_listed_plugins()
    families = registry.describe(family)
    if as_json:
        typer.echo(json.dumps({"families": families}, indent=2, ensure_ascii=False))
        return
    for listing in families:
        typer.echo(f"{listing['family']}: {listing['summary']}")
        for part in listing["parts"]:
            typer.echo(f"  {part['name']:<22} {part['summary']}")
            for option in part["options"]:
                value = "required" if option["required"] else f"= {option['default']}"
                typer.echo(f"  {'':<22}   {option['name']}: {option['type']} {value}")


def _configs(path: str) -> list[RunConfig]:
    """Return the configurations of a run file that differ in their data."""
    from lamella.plan import load_plan

    configs = load_plan(Path(path)).runs.values()
    return list({config.data.model_dump_json(): config for config in configs}.values())


def _mixture(config: RunConfig, files: Sequence[DataFile]) -> list[dict[str, Any]]:
    """Return what an epoch takes of each training file; nothing if it takes everything once."""
    from lamella.data.mixture import mix

    examples = {file.path: file.examples for file in files}
    one_epoch = config.training.model_copy(update={"epochs": 1, "max_steps": None})
    mixture = mix([(file, examples[file.file]) for file in config.data.train_files], one_epoch)
    shares = mixture.shares if mixture is not None else ()
    total = max(1, sum(share.examples for share in shares))
    return [
        share.file.model_dump()
        | {
            "questions": share.questions,
            "taken": share.examples,
            "percent": 100 * share.examples / total,
            "unanswerable": share.unanswerable,
        }
        for share in shares
    ]


def _counting_tokenizer(encoder: str | None, configs: Sequence[RunConfig]) -> Any:
    """Return the tokenizer of the encoder; by default that of a run file, if local, or the bundled one."""
    from lamella.config import DEFAULT_ENCODER
    from lamella.encoder.sources import Source, find_encoder, find_local_encoder, packaged_encoder
    from lamella.errors import EncoderError
    from lamella.models.base_tokenizer import tokenizer_folder
    from lamella.models.tokenizer_file import TOKENIZER, read_tokenizer

    source = find_encoder(encoder) if encoder else None
    if source is None:
        named = dict.fromkeys(config.encoder.name for config in configs)
        source = next(filter(None, map(find_local_encoder, named)), None) or packaged_encoder(DEFAULT_ENCODER)
    if source is None:
        return None
    folder = tokenizer_folder(source.folder)
    if not (folder / TOKENIZER).is_file():  # an older tokenizer, which transformers converts
        try:
            from lamella.encoder.pretrained import load_tokenizer
        except ModuleNotFoundError:
            raise EncoderError(
                f"{folder}: expected tokenizer.json to count tokens with; the file is missing, and "
                "other tokenizers need torch."
            ) from None
        return load_tokenizer(Source(source.name, folder, source.kind)).backend_tokenizer
    return read_tokenizer(folder)


def _fix_targets(out: Path | None, files: list[str], overwrite: bool) -> dict[str, Path]:
    """Return where the fixed copy of each file goes: to `out`, or into that folder for several files."""
    from lamella.data.file_formats.writers import format_of
    from lamella.errors import UsageError
    from lamella.files import check_output_file

    if out is None:
        return {}
    targets = {file: out if len(files) == 1 else out / f"{Path(file.replace(':', '-')).name}" for file in files}
    for file, target in targets.items():
        if len(files) > 1 and not format_of(target):
            targets[file] = target.with_name(f"{target.name}.json")
    if len(set(targets.values())) < len(targets):
        raise UsageError(f"check --fix-to {out}: expected files with different names, got {', '.join(files)}; "
                         "fix them one by one.")  # fmt: skip
    if len(files) == 1 and not format_of(out):
        raise UsageError(f"check --fix-to {out}: expected a name that ends in .json, .jsonl, .json.gz or .jsonl.gz.")
    if len(files) > 1 and out.is_file():
        raise UsageError(f"check --fix-to {out}: expected a folder for {len(files)} files, got a file.")
    for target in targets.values():
        check_output_file(target, inputs=files, overwrite=overwrite)
    return targets
