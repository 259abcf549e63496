"""Commands about data and parts: check, convert, parts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from lamella.cli.app import AsJson, Encoding, OnBadAnswer, app


@app.command()
def check(
    files: Annotated[list[str], typer.Argument(help="Data files; demo:train and demo:dev are bundled.")],
    fix: Annotated[
        Path | None,
        typer.Option("--fix", help="Write a fixed copy to this file (to this folder, for several files)."),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option("--encoder", help="Count tokens as this encoder does; default: the bundled one, if installed."),
    ] = None,
    encoding: Encoding = None,
    as_json: AsJson = False,
) -> None:
    """Find everything that is wrong with data files. Exit code: 0 clean, 1 problems, 2 unreadable."""
    from lamella.data.checks import check as check_files
    from lamella.data.fixes import fix as fix_file
    from lamella.data.formats import read
    from lamella.data.writers import write
    from lamella.errors import UnreadableError

    targets = _fix_targets(fix, files)
    read_files, unreadable = [], []
    for name in files:
        try:
            read_files.append(read(name, encoding=encoding))
        except UnreadableError as error:
            unreadable.append(str(error))
    report = check_files(read_files, tokenizer=_counting_tokenizer(encoder))
    if as_json:
        typer.echo(json.dumps({**report.to_json(), "unreadable": unreadable}, ensure_ascii=False, indent=2))
    else:
        for problem in report.problems:
            typer.echo(str(problem))
        for one in report.statistics:
            typer.echo(
                f"{one.file}: {one.format}, {one.articles} articles, {one.contexts} contexts, "
                f"{one.questions} questions ({one.unanswerable} unanswerable)"
            )
        kinds = Counter(f"{problem.severity} {problem.kind}" for problem in report.problems)
        if kinds or not unreadable:
            typer.echo(", ".join(f"{kind}: {count}" for kind, count in kinds.most_common()) or "no problems")
    for file in read_files if fix else []:
        fixed = fix_file(file, report.problems)
        target = targets[file.path]
        write(fixed.examples, target)
        dropped = len(file.examples) - len(fixed.examples) + file.unread
        typer.echo(
            f"{target}: {fixed.fixed} problems fixed, {len(fixed.dropped)} not fixable, {dropped} questions dropped",
            err=as_json,
        )
    for line in unreadable:
        typer.echo(f"lamella: {line}", err=True)
    raise typer.Exit(2 if unreadable else 0 if report.clean else 1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A data file in any known format.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write; .jsonl is flat, .json is SQuAD 2.0.")
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", help="The format to write (see `lamella parts writer`)."),
    ] = None,
    on_bad_answer: OnBadAnswer = "refuse",
    encoding: Encoding = None,
) -> None:
    """Rewrite a data file in another format."""
    from lamella.data.dataset import load_examples
    from lamella.data.writers import write

    loaded = load_examples([source], on_bad_answer=on_bad_answer or "refuse", encoding=encoding)
    write(loaded.examples, target, format=to)
    typer.echo(f"{target}: {len(loaded.examples)} questions ({loaded.fixed} fixed, {loaded.skipped} skipped)")


@app.command()
def parts(
    family: Annotated[str | None, typer.Argument(help="Only this family.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the parts a run file can name, with their options."""
    from lamella import registry

    listing = registry.describe(family)
    if as_json:
        typer.echo(json.dumps(listing, indent=2, ensure_ascii=False))
        return
    for one in listing:
        typer.echo(f"{one['family']}: {one['summary']}")
        for part in one["parts"]:
            typer.echo(f"  {part['name']:<22} {part['summary']}")
            for option in part["options"]:
                value = "required" if option["required"] else f"= {option['default']}"
                typer.echo(f"  {'':<22}   {option['name']}: {option['type']} {value}")


def _counting_tokenizer(encoder: str | None) -> Any:
    """The tokenizer to count with; the bundled one is used where it is there, and not missed where it is not."""
    from tokenizers import Tokenizer

    from lamella.config import DEFAULT_ENCODER
    from lamella.encoder.sources import find_encoder, packaged_encoder
    from lamella.errors import EncoderError

    source = find_encoder(encoder) if encoder else packaged_encoder(DEFAULT_ENCODER)
    if source is None:
        return None
    path = source.folder / "tokenizer.json"
    if not path.is_file():
        raise EncoderError(f"{source.folder}: expected tokenizer.json, to count tokens with. It is not there.")
    return Tokenizer.from_file(str(path))


def _fix_targets(fix: Path | None, files: list[str]) -> dict[str, Path]:
    """Return where the fixed copy of each file goes: to the given path, or into that folder for several files."""
    from lamella.data.writers import format_of
    from lamella.errors import UsageError

    if fix is None:
        return {}
    targets = {file: fix if len(files) == 1 else fix / f"{Path(file.replace(':', '-')).name}" for file in files}
    for file, target in targets.items():
        if len(files) > 1 and not format_of(target):
            targets[file] = target.with_name(f"{target.name}.json")
    if len(set(targets.values())) < len(targets):
        raise UsageError("check --fix: expected files of different names, to write into one folder; fix them apart.")
    if len(files) == 1 and not format_of(fix):
        raise UsageError(f"check --fix {fix}: expected a name that ends in .json or .jsonl (or these and .gz).")
    return targets
