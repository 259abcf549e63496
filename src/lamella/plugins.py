"""Import the modules of other packages that register parts.

A package offers its parts in the entry-point group `lamella.parts`, each entry a module:

    [project.entry-points."lamella.parts"]
    my_package = "my_package.parts"

A run file can name a module as well, `plugins = ["my_package.parts"]`. Importing the module registers its parts.

A saved model names the modules that it needs. A model may come from anyone, and importing a module runs its code, so
only modules are imported for it that the user has chosen: those of installed packages that offer parts, those that were
imported before, and those that the environment variable LAMELLA_PLUGINS lists, separated by commas.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lamella.errors import EXTRAS, LamellaError, MissingLibraryError, PluginError, UntrustedPluginError, one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "lamella.parts"
TRUSTED = "LAMELLA_PLUGINS"  # the environment variable that lists modules which saved models may name

_imported: set[str] = set()
_installed_imported = False


def import_installed_plugins() -> None:
    """Import every module that an installed package offers in the entry-point group, once per process."""
    global _installed_imported
    if _installed_imported:
        return
    from importlib.metadata import entry_points  # here, as it is slow to import

    _installed_imported = True  # already now: a plugin may ask the registry while it is imported
    try:
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.value, entry.name)):
            _import(entry.module, _describe(entry))
    except PluginError:
        _installed_imported = False
        raise


def import_plugins(modules: Iterable[str]) -> None:
    """Import the modules that a run file names."""
    for module in modules:
        _import(module, f"plugin {module!r}")


def import_listed_plugins() -> None:
    """Import the modules that the environment variable lists."""
    import_plugins(sorted(_listed()))


def import_trusted_plugin(module: str) -> None:
    """Import a module that a saved model names; raise an error if the user has not chosen it."""
    if module not in _imported | _trusted():
        raise UntrustedPluginError(f"plugin {module!r}: not offered by an installed package, nor listed in {TRUSTED}.")
    import_plugins([module])


@contextmanager
def reading_options(part: str) -> Iterator[None]:
    """Turn whatever is wrong with the options of a part, given by its qualified name, into one error."""
    try:
        yield
    except Exception as error:
        raise PluginError(f"{part}: its options cannot be used: {one_line(error)}; repair it.") from error


def _trusted() -> set[str]:
    from importlib.metadata import entry_points

    return _listed() | {entry.module for entry in entry_points(group=GROUP)}


def _listed() -> set[str]:
    return {name.strip() for name in os.environ.get(TRUSTED, "").split(",")} - {""}


def _import(module: str, plugin: str) -> None:
    if module in _imported:
        return
    _imported.add(module)
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever it is, it is the plugin's
        _imported.discard(module)
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS["train"]:
            raise PluginError(str(MissingLibraryError(plugin, [error.name]))) from error
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        advice = "install the package that holds it" if missing else "repair it, or uninstall its package"
        known = missing or isinstance(error, LamellaError)
        reason = one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"
        raise PluginError(f"{plugin} cannot be imported: {reason}; {advice}.") from error


def _describe(entry: EntryPoint) -> str:
    package = entry.dist
    return f"plugin {entry.module!r} of {f'{package.name} {package.version}' if package else 'an unknown package'}"
