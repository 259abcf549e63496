"""The command line: one thin function a command. Heavy imports stay inside, so that `--help` is instant."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lamella.version import __version__

app = typer.Typer(
    name="lamella",
    help="Extractive question answering: train, score and ask thin readers on a pretrained encoder.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that --out holds.")]
ModelPath = Annotated[Path, typer.Option("--model", "-m", help="A model folder, or a run folder that holds one.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Windows a batch.")]
OnBadAnswer = Annotated[
    Literal["refuse", "fix", "skip"] | None,
    typer.Option("--on-bad-answer", help="What to do with a data file that has errors."),
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"], typer.Option("--precision", help="Number format of the encoder.")
]


def _version(wanted: bool) -> None:
    if wanted:
        from lamella.runs import library_versions

        typer.echo(f"lamella {__version__} on Python {sys.version.split()[0]}")
        for name, version in library_versions().items():
            typer.echo(f"  {name} {version}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Versions of lamella and its libraries.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Extractive question answering: train, score and ask thin readers on a pretrained encoder."""


@app.command()
def check(
    files: Annotated[list[str], typer.Argument(help="Data files; demo:train and demo:dev are bundled.")],
    fix: Annotated[
        Path | None,
        typer.Option("--fix", help="Write what can be mended to this file (a folder, for several files)."),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option("--encoder", help="Count tokens as this encoder does; default: the bundled one, if installed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find everything that is wrong with data files. Exit code: 0 clean, 1 problems, 2 unreadable."""
    from lamella.data.checks import check as check_files
    from lamella.data.fixes import mend
    from lamella.data.readers import read
    from lamella.data.writers import write
    from lamella.errors import UnreadableError

    targets = _fix_targets(fix, files)
    read_files, unreadable = [], []
    for name in files:
        try:
            read_files.append(read(name))
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
        typer.echo(", ".join(f"{kind}: {count}" for kind, count in kinds.most_common()) or "no problems")
    for file in read_files if fix else []:
        mended = mend(file, report.problems)
        target = targets[file.path]
        write(mended.examples, target)
        left_out = len(file.examples) - len(mended.examples) + file.unread
        typer.echo(
            f"{target}: {mended.mended} problems mended, {len(mended.dropped)} that could not be, and with them "
            f"{left_out} questions left out",
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
) -> None:
    """Rewrite a data file in another format."""
    from lamella.data.loading import load_examples
    from lamella.data.writers import write

    loaded = load_examples([source], on_bad_answer=on_bad_answer or "refuse")
    write(loaded.examples, target, format=to)
    typer.echo(f"{target}: {len(loaded.examples)} questions ({loaded.mended} mended, {loaded.skipped} skipped)")


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


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run file (TOML), or the config.json of an earlier run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to write.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change an option: --set training.epochs=3. Repeatable."),
    ] = None,
    on_bad_answer: OnBadAnswer = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that --out holds.")] = False,
    auto_batch: Annotated[
        bool, typer.Option("--auto-batch", help="Out of memory, compute a batch in halves, and those in halves.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Read hidden states that `lamella extract` wrote there.")
    ] = None,
    overfit: Annotated[
        int | None,
        typer.Option("--overfit", min=1, help="Only check that so many questions can be learnt by heart, say 32."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a reader as a run file describes, or several of them in one pass."""
    from lamella.errors import UsageError
    from lamella.plan import load_plan

    if resume and overwrite:
        raise UsageError("train: expected --resume or --overwrite, not both.")
    overrides = list(settings or [])
    if on_bad_answer:
        overrides.append(f"data.on_bad_answer={on_bad_answer}")
    plan = load_plan(config, overrides)

    from lamella.training.run import train_plan

    train_plan(
        plan,
        out,
        overwrite=overwrite,
        resume=resume,
        auto_batch=auto_batch,
        overfit=overfit,
        cache=cache,
        say=typer.echo,
    )


@app.command()
def extract(
    config: Annotated[Path, typer.Argument(help="The run file (TOML) whose learners will read the hidden states.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write them into.")],
    storage: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"], typer.Option("--storage", help="Number format on disk.")
    ] = "fp16",
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="Keep every layer, not only those that the learners read.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change an option: --set data.max_train_samples=500. Repeatable."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a cache of other options.")] = False,
) -> None:
    """Write the hidden states of a frozen encoder to disk, to train many heads from with `train --cache`."""
    from lamella.plan import load_plan

    plan = load_plan(config, list(settings or []))

    from lamella.training.extract import extract as extract_states

    extract_states(plan, out, storage=storage, all_layers=all_layers, overwrite=overwrite, say=typer.echo)


@app.command()
def predict(
    data: Annotated[str, typer.Argument(help="The data file with the questions.")],
    model: ModelPath,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to write.")],
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Answer the questions of a data file; writes predictions.json and what belongs to it."""
    from lamella.inference.evaluate import load_model, read_questions
    from lamella.inference.predict import predict as answer
    from lamella.inference.predict import write_predictions
    from lamella.runs import new_run

    examples, reader = read_questions(data), load_model(model, precision)
    with new_run(out, "predict", overwrite=overwrite, needs=reader.folders) as folder:
        write_predictions(folder, reader, answer(reader, examples, batch_size=batch_size))
    typer.echo(f"{out}: {len(examples)} questions answered")


@app.command()
def evaluate(
    data: Annotated[str, typer.Argument(help="The data file with the true answers.")],
    predictions: Annotated[
        Path | None,
        typer.Argument(help="Predictions in the official format: {id: text}."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="Predict with this model first (needs --out)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The run folder to write."),
    ] = None,
    null_odds: Annotated[
        Path | None,
        typer.Option("--null-odds", help="{id: score of no answer minus score of the answer}."),
    ] = None,
    na_prob: Annotated[
        Path | None,
        typer.Option("--na-prob", help="{id: probability of no answer}."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option("--na-prob-thresh", help="Take the scores above this for no answer (the official script: 1.0)."),
    ] = None,
    missing: Annotated[
        Literal["error", "empty"],
        typer.Option("--missing", help="A question without a prediction: an error, or empty."),
    ] = "error",
    language: Annotated[
        Literal["en", "ko"] | None,
        typer.Option("--language", help="Whose normalisation and F1; default: as the data says."),
    ] = None,
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Score predictions as the official SQuAD 2.0 script does, or those of a model."""
    from lamella.errors import UsageError
    from lamella.inference.evaluate import evaluate_file, evaluate_model, load_model, read_questions
    from lamella.runs import new_run

    if (predictions is None) == (model is None):
        raise UsageError("evaluate: expected either a predictions file or --model, one of the two.")
    if predictions is not None:
        if out is not None:
            raise UsageError("evaluate: --out is for --model; the scores of a predictions file are printed.")
        results = evaluate_file(
            data,
            predictions,
            null_odds=null_odds,
            na_prob=na_prob,
            threshold=threshold,
            missing=missing,
            language=language,
        )
    elif model is not None:
        if out is None:
            raise UsageError("evaluate --model: expected --out, the run folder to write.")
        if null_odds or na_prob or threshold is not None or missing != "error":
            raise UsageError("evaluate --model: options about scores are for a predictions file; a model has its own.")
        examples, reader = read_questions(data, labelled=True), load_model(model, precision)
        with new_run(out, "evaluate", overwrite=overwrite, needs=reader.folders) as folder:
            results = evaluate_model(reader, examples, folder, batch_size=batch_size, language=language)
    _print_results(results, as_json)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    model: ModelPath,
    context: Annotated[str, typer.Option("--context", "-c", help="The text to read: a file, or - for standard input.")],
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers to give.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Ask a question of a text."""
    text = _read_text(context)

    from lamella.inference.reader import Reader

    answers = Reader.load(model).ask(question, text, top_k=top_k)
    if as_json:
        typer.echo(json.dumps(answers, ensure_ascii=False))
        return
    for answer in answers:
        place = f"characters {answer['start']}-{answer['end']}" if answer["answer"] else "the text does not say"
        typer.echo(f"{answer['answer'] or '(no answer)'}  [{answer['score']:.2f}, {place}]")


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
    """Where the mended form of each file goes: to the path given, or, when there are several, into the folder given."""
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


def _read_text(source: str) -> str:
    from lamella.errors import UnreadableError

    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(os.path.expanduser(source)).read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{source}: expected UTF-8 text; byte {error.start} is not.") from None
    except OSError as error:
        raise UnreadableError(f"{source}: cannot be read ({error.strerror}).") from None


def _print_results(results: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    width = max(len(key) for key in results)
    for key, value in results.items():
        typer.echo(f"{key:<{width}}  {value:.4f}" if isinstance(value, float) else f"{key:<{width}}  {value}")
