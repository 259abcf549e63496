"""The command line itself, and the options that several commands share."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from lamella.version import __version__

# In the order of the work, which is that of the help.
COMMANDS = (
    "check", "convert", "parts", "extract", "train", "sweep", "predict", "evaluate", "calibrate", "ensemble", "ask",
    "export", "compare", "recommend", "analyse", "report",
)  # fmt: skip


class InOrder(TyperGroup):
    """Lists the commands in the order of the work, wherever they are defined."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=COMMANDS.index)


app = typer.Typer(
    name="lamella",
    cls=InOrder,
    help="Extractive question answering: train, score and ask thin readers on a pretrained encoder.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that --out holds.")]
ModelName = Annotated[
    str,
    typer.Option("--model", "-m", help="A model folder, a run folder with one, `default`, or a model of transformers."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Windows a batch.")]
OnBadAnswer = Annotated[
    Literal["refuse", "fix", "skip"] | None,
    typer.Option("--on-bad-answer", help="What to do with a data file that has errors."),
]


def _check_language(name: str | None) -> str | None:
    if name is not None:
        from lamella.languages import get_language

        get_language(name)
    return name


Language = Annotated[
    str | None,
    typer.Option(
        "--language",
        metavar="NAME",
        callback=_check_language,
        help="Language of the answers, which decides how they are scored (see `lamella parts language`); "
        "default: detected from the data.",
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        metavar="NAME",
        help="Text encoding; default: UTF-8, or UTF-16 with a byte order mark.",
    ),
]
RunFolders = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Run folders, result files, or folders of them.")
]
DataOfRuns = Annotated[
    str | None, typer.Option("--data", help="The data file that they answered; default: as the runs record.")
]
Address = Annotated[
    str | None, typer.Option("--address", help="The Ray cluster, host:port or auto; default: one on this machine.")
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"], typer.Option("--precision", help="Number format of the encoder.")
]


def _version(wanted: bool) -> None:
    if wanted:
        from lamella.environment import library_versions

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
