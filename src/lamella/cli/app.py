"""The command line application, and the options that several commands share."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from types import MethodType
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from lamella.version import __version__

# In the order of the work, in which --help lists them; a command that is not listed here comes last.
COMMANDS = (
    "check", "convert", "parts", "extract", "train", "sweep", "average", "predict", "evaluate", "calibrate", "ensemble",
    "ask", "index", "serve", "export", "compare", "recommend", "analyse", "report",
)  # fmt: skip
COMPLETION = ("install_completion", "show_completion")
KINDS = {"int": "N", "int range": "N", "float": "X", "float range": "X", "str": "TEXT", "path": "PATH"}  # typer's: ours


class OrderedGroup(TyperGroup):
    """List the commands in the order of the work, and hide the options that install shell completion."""

    def list_commands(self, context: Any) -> list[str]:
        places = {name: place for place, name in enumerate(COMMANDS)}
        return sorted(super().list_commands(context), key=lambda name: places.get(name, len(places)))

    def get_params(self, context: Any) -> list[Any]:
        params = super().get_params(context)
        for param in params:
            if param.name in COMPLETION:
                param.hidden = True  # type: ignore[attr-defined]
        return params


class UserCommand(TyperCommand):
    """Expand `~` in paths, as in `--out=~/runs`, where a shell leaves it; help and errors have no types of Python."""

    def get_params(self, context: Any) -> list[Any]:
        params = super().get_params(context)
        for param in params:
            if isinstance(param, TyperArgument | TyperOption):
                param.display_type_rich = MethodType(_value_in_help, param)  # type: ignore[method-assign]
        return params

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        try:
            return super().parse_args(context, arguments)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's opening, which typer passes on
            raise

    def invoke(self, context: Any) -> Any:
        context.params = {name: _expand_user(value) for name, value in context.params.items()}
        return super().invoke(context)


def _value_in_help(param: TyperArgument | TyperOption, ctx: Any) -> str:
    """Name the value as in `--top-k N`, where typer writes `--top-k <int range>`; an argument is named by itself."""
    if isinstance(param, TyperArgument):
        return ""
    if param.metavar is not None:
        return param.metavar
    kind = param.display_type(ctx).removeprefix("<").removesuffix(">")
    return KINDS.get(kind, kind)


def _expand_user(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_expand_user, value))
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


app = typer.Typer(
    name="lamella",
    cls=OrderedGroup,
    help="Extractive question answering: train, score and use small readers on a pretrained encoder.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[Path, typer.Option("--out", "-o", metavar="RUN", help="The run folder to write.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in --out.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override an option, as in training.epochs=3. Repeatable."),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A model folder, a run folder with a model, `default`, or a transformers checkpoint.",
    ),
]
BATCH_SIZE = 32  # of the commands that answer
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Windows per batch.")]
HowEager = Annotated[
    Literal["eager", "balanced", "strict"] | None,
    typer.Option(
        "--answer",
        help="Answer as if 90 %, 50 % or 25 % of the questions had an answer; default: as many as in the data it was "
        "tuned on.",
    ),
]
OnBadAnswer = Annotated[
    Literal["refuse", "fix", "skip"] | None,
    typer.Option("--on-bad-answer", help="Refuse a data file with errors, repair it, or skip the faulty questions."),
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
DocumentEncoding = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        metavar="NAME",
        help="Text encoding; default: UTF-8, or UTF-16 with a byte order mark; of documents, otherwise detected.",
    ),
]
RunFolders = Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders, result files, or folders of them.")]
RunData = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="The data file the runs answered; default: the file they recorded."),
]
Engine = Annotated[Literal["local", "ray"], typer.Option("--engine", help="Run in this process or on a Ray cluster.")]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Ray cluster, host:port or auto; default: start one on this machine."),
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16", "int8"],
    typer.Option("--precision", help="Number format of the encoder; int8 is for CPUs and needs no torch."),
]


def warn_of_unchecked_options(file: Path | str) -> None:
    """Print what could not be checked about a run file, because torch is not installed."""
    from lamella.errors import EXTRAS, MissingLibraryError
    from lamella.registry import uses_outline

    if uses_outline():
        unchecked = f"{file}: names are checked; checking the values of the options of parts"
        typer.echo(f"warning: {MissingLibraryError(unchecked, EXTRAS['train'])}", err=True)


def _print_version(requested: bool) -> None:
    if requested:
        from lamella.environment import library_versions

        typer.echo(f"lamella {__version__} on Python {sys.version.split()[0]}")
        for name, version in library_versions().items():
            typer.echo(f"  {name} {version}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the versions of lamella and its libraries."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Extractive question answering: train, score and use small readers on a pretrained encoder."""


def with_one_command(name: str) -> typer.Typer:
    """Return the application with this command alone, which is built faster; with all if it has no such command."""
    for info in app.registered_commands:
        info.cls = UserCommand
    named = [info for info in app.registered_commands if (info.name or getattr(info.callback, "__name__", "")) == name]
    if not named:
        return app
    small = copy.copy(app)
    small.registered_commands = named
    return small
