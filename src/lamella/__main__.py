"""Run the command line, `lamella` or `python -m lamella`, and turn errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import importlib.util
import sys


def main() -> None:
    """Run a command; `--debug`, anywhere among the arguments, shows the traceback of an error."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]

    from lamella.cli import app
    from lamella.errors import LamellaError, MissingLibraryError

    try:
        app(args=arguments, prog_name="lamella")
    except LamellaError as error:
        if debug:
            raise
        sys.stderr.write(f"lamella: {error}\n")
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        library = (error.name or "lamella").partition(".")[0]
        if debug or library == "lamella" or _is_installed(library):  # a module of it is missing: a traceback helps
            raise
        command = next((argument for argument in arguments if not argument.startswith("-")), "lamella")
        missing = MissingLibraryError(f"`lamella {command}`", [library])
        sys.stderr.write(f"lamella: {missing}\n")
        sys.exit(missing.exit_code)
    except OSError as error:  # a full disk or a removed folder: a traceback would not help
        if debug:
            raise
        sys.stderr.write(f"lamella: {error.filename or 'the output'}: {error.strerror or error}\n")
        sys.exit(1)


def _is_installed(library: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(library) is not None
    return False


if __name__ == "__main__":
    main()
