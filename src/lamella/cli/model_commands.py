"""Commands that change or rewrite models: average, calibrate, export."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from lamella.cli.app import AsJson, BatchSize, ModelName, Precision, app
from lamella.decoding_options import DecodingOptions, Merge


@app.command()
def average(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Model folders, run folders with a model, or hub ids; with equal encoder, tuning, head and windows.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The model folder to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier model in --out.")] = False,
    half: Annotated[bool, typer.Option("--half", help="Round the means to fp16.")] = False,
) -> None:
    """Write the mean of several models as one model.

    It answers at the cost of one model. Average models that continued the training of the same model: the mean of
    models with unrelated starts is usually useless, because their hidden units and LoRA factors do not correspond.
    """
    from lamella.errors import counted
    from lamella.export.average import average as write_mean

    write_mean(models, out, half=half, overwrite=overwrite)
    typer.echo(f"{out}: mean of {counted(len(models), 'model')} written")
    typer.echo(
        "the threshold of the mean is 0; tune it on separate questions: "
        f"lamella calibrate DATA --model {shlex.quote(str(out))}"
    )


@app.command()
def calibrate(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA", help="The data files to tune on, not used for training or scoring; each counts the same."
        ),
    ],
    model: ModelName,
    method: Annotated[
        Literal["temperature", "isotonic", "features"],
        typer.Option(
            "--method",
            help="The probability of no answer: a logistic curve of the null odds, isotonic regression, or a logistic "
            "regression on several features of the answers.",
        ),
    ] = "temperature",
    merge: Annotated[
        Merge | None,
        typer.Option(
            "--merge",
            help="Let the windows of a long text compete by their scores, or by their leads over no answer and the "
            "words of the question; default: as the model does.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Store in a new copy of the model; the model itself stays as it is."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier model in --out.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Store what was tuned even if it is not known to be better than before.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be stored, and store nothing.")] = False,
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Tune a model's no-answer threshold and probability.

    Each is stored with the model if it is better than before on articles that it was not tuned on, else kept. A model
    has one threshold: tune it in the --precision that will answer.
    """
    from lamella.errors import UsageError
    from lamella.files import same_file
    from lamella.inference.questions import read_questions
    from lamella.models.loading import load_model, torch_if_installed
    from lamella.scoring.calibrate import calibrate_model
    from lamella.scoring.tuned_folder import folder_to_tune, store_tuned

    if dry_run and out is not None:
        raise UsageError("calibrate: --dry-run stores nothing; leave out --out, or --dry-run.")
    if overwrite and out is None:
        raise UsageError("calibrate: --overwrite needs --out.")
    folder = None if dry_run else folder_to_tune(model, data, out=out, overwrite=overwrite)
    if any(same_file(*pair) for pair in itertools.combinations(data, 2)):
        raise UsageError(f"calibrate: expected different data files, got one of them twice: {', '.join(data)}.")
    examples = {file: read_questions(file, labelled=True) for file in data}
    reader = load_model(model, precision=precision, backend=torch_if_installed(model, precision), inference_only=True)
    before = reader.decoding
    tuned = calibrate_model(
        reader, examples, method=method, merge=merge, force=force, batch_size=batch_size, precision=reader.precision
    )
    store = folder is not None and (out is not None or tuned.decoding != before)
    if folder is not None and store:
        store_tuned(reader.folders[0], tuned, folder, overwrite=overwrite)
    if as_json:
        decoding = tuned.decoding.model_dump(include={"calibration", "merge", "tuned_on"})
        typer.echo(json.dumps({**tuned.report, **decoding, "stored": store}, indent=2))
        return
    for line in tuned.lines():
        typer.echo(line)
    if tuned.kept:
        typer.echo("to store the tuned threshold all the same, pass --force")
    typer.echo(
        "nothing stored (--dry-run)"
        if folder is None
        else f"{folder}: copy of {model} written, with {_what_changed(before, tuned.decoding)}"
        if out is not None
        else f"{folder}: stored {_what_changed(before, tuned.decoding)}"
        if store
        else f"{folder}: unchanged"
    )


def _what_changed(before: DecodingOptions, after: DecodingOptions) -> str:
    """Return which of the numbers that decide about no answer were tuned, and which are as before."""
    parts = {
        "threshold": before.null_score_diff_threshold != after.null_score_diff_threshold,
        "calibration": before.calibration != after.calibration,
        "rule for long texts": (before.merge, before.window_penalty) != (after.merge, after.window_penalty),
    }
    tuned = [name for name, changed in parts.items() if changed]
    kept = [name for name in ("threshold", "calibration") if not parts[name]]
    texts = [f"the tuned {' and '.join(tuned)}"] if tuned else []
    texts += [f"the {' and '.join(kept)} as before"] if kept else []
    return "; ".join(texts)


@app.command()
def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, a run folder with a model, or a hub id.")
    ],
    flatten: Annotated[
        Path | None,
        typer.Option(
            "--flatten", metavar="DIR", help="Write it directly on the pretrained encoder, without intermediate models."
        ),
    ] = None,
    half: Annotated[
        Path | None, typer.Option("--half", metavar="DIR", help="Write it with tensors rounded to fp16.")
    ] = None,
    rounded_base: Annotated[
        bool,
        typer.Option(
            "--rounded-base",
            help="With --half: record that the base encoder is a copy rounded to 8 bits, to accept the original too.",
        ),
    ] = False,
    base_tokenizer: Annotated[
        bool,
        typer.Option(
            "--base-tokenizer",
            help="With --half: write no tokenizer files; the model uses the tokenizer of its base encoder.",
        ),
    ] = False,
    as_transformers: Annotated[
        Path | None,
        typer.Option("--as-transformers", metavar="DIR", help="Write a checkpoint for AutoModelForQuestionAnswering."),
    ] = None,
    peft: Annotated[
        Path | None,
        typer.Option("--peft", metavar="DIR", help="Write a LoRA folder for peft.PeftModel.from_pretrained."),
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", metavar="DIR", help="Write a folder for onnxruntime, which needs no torch.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="With --onnx: round the encoder's weights to 8 bits.")] = False,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="With --int8: measure the loss in quality on this data file."),
    ] = None,
) -> None:
    """Write a model in another format, into a new folder.

    Choose exactly one output format: --flatten, --half, --as-transformers, --peft or --onnx.
    """
    from lamella.errors import UsageError

    modes = {
        "--flatten": flatten,
        "--half": half,
        "--as-transformers": as_transformers,
        "--peft": peft,
        "--onnx": onnx,
    }
    chosen = {mode: folder for mode, folder in modes.items() if folder is not None}
    if len(chosen) != 1:
        raise UsageError(
            f"export: expected exactly one output format of {', '.join(modes)}, got {', '.join(chosen) or 'none'}."
        )

    if onnx is None and (int8 or data):
        raise UsageError("export: --int8 and --data need --onnx.")
    if half is None and rounded_base:
        raise UsageError("export: --rounded-base needs --half.")
    if half is None and base_tokenizer:
        raise UsageError("export: --base-tokenizer needs --half.")
    if onnx is not None:
        from lamella.export.onnx_export import export_onnx

        typer.echo("\n".join(export_onnx(model, onnx, int8=int8, data=data)))
        return

    from lamella.export.flatten import flatten as write_flat
    from lamella.export.half import halve
    from lamella.export.peft_export import save_as_peft
    from lamella.export.transformers_checkpoint import save_as_transformers

    write: dict[str, Callable[[str, Path], object]] = {
        "--flatten": write_flat,
        "--half": partial(halve, rounded_base=rounded_base, base_tokenizer=base_tokenizer),
        "--as-transformers": save_as_transformers,
        "--peft": save_as_peft,
    }
    for mode, folder in chosen.items():
        write[mode](model, folder)
        typer.echo(f"{folder}: written")
