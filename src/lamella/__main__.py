"""Run the command line, `lamella` or `python -m lamella`, and turn errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130  # the exit code of typer, and of shells, for Ctrl-C


def main() -> None:
    """Run a command; `--debug`, anywhere among the arguments, shows the traceback of an error."""
    try:
        _run_command()
    except KeyboardInterrupt:  # while the command line is imported; later, typer ends the command in the same way
        sys.exit(INTERRUPTED)


def _run_command() -> None:
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]

    from lamella.cli import with_one_command
    from lamella.errors import OUT_OF_MEMORY, LamellaError, MissingLibraryError
    from lamella.progress import progress_lines

    try:
        with _warnings_in_one_line(), progress_lines():
            with_one_command(arguments[0] if arguments else "")(args=arguments, prog_name="lamella")
    except LamellaError as error:
        if debug:
            traceback.print_exception(error)
        else:
            _print_error(str(error))
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        library = (error.name or "lamella").partition(".")[0]
        if debug or library == "lamella" or _is_installed(library):  # a module of it is missing: a traceback helps
            raise
        command = next((argument for argument in arguments if not argument.startswith("-")), "lamella")
        missing = MissingLibraryError(f"`lamella {command}`", _missing_with(library))
        _print_error(str(missing))
        sys.exit(missing.exit_code)
    except OSError as error:  # a full disk or a removed folder: a traceback would not help
        if debug:
            raise
        _print_error(f"{error.filename or 'the output'}: {error.strerror or error}")
        sys.exit(1)
    except RuntimeError as error:
        if debug or not any(message in str(error) for message in OUT_OF_MEMORY):
            raise
        advice = "stop other programs that use it"
        if any(name in str(error) for name in ("CUDA", "CUBLAS")):
            advice += ", or set CUDA_VISIBLE_DEVICES to another GPU, or to nothing for the CPU"
        _print_error(f"out of memory: the model does not fit into what is left; {advice}.")
        sys.exit(1)


def _print_error(message: str) -> None:
    from lamella.errors import for_terminal

    sys.stderr.write(f"lamella: {for_terminal(message)}\n")


def _missing_with(library: str) -> list[str]:
    """Return a missing library together with the missing libraries of its extra, which would be reported next."""
    from lamella.errors import EXTRAS

    needed = next((names for names in EXTRAS.values() if library in map(_module, names)), (library,))
    return [name for name in needed if not _is_installed(_module(name))]


def _module(library: str) -> str:
    """Return the name by which a library is imported."""
    return library.replace("-", "_")


def _is_installed(library: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(library) is not None
    return False


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print the warnings of this package without the line of code that issued them, each once."""
    from lamella.errors import LamellaWarning, for_terminal

    with warnings.catch_warnings():
        warnings.simplefilter("always", LamellaWarning)
        show, shown = warnings.showwarning, set()

        def print_line(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            if not issubclass(category, LamellaWarning):
                show(message, category, *place, **options)
            elif str(message) not in shown:
                shown.add(str(message))
                sys.stderr.write(f"warning: {for_terminal(str(message))}\n")

        warnings.showwarning = print_line
        yield


if __name__ == "__main__":
    main()
