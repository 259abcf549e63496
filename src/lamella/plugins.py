"""Import the modules of other packages that register parts.

A package offers its parts in the entry-point group `lamella.parts`, each entry a module:

    [project.entry-points."lamella.parts"]
    my_package = "my_package.parts"

A run file can name a module as well, `plugins = ["my_package.parts"]`, and a saved model names those it needs.
Importing the module registers its parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lamella.errors import EXTRAS, LamellaError, MissingLibraryError, PluginError, one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "lamella.parts"

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
    """Import the modules that a run file or a saved model names."""
    for module in modules:
        _import(module, f"plugin {module!r}")


def _import(module: str, plugin: str) -> None:
    if module in _imported:
        return
    _imported.add(module)
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever it is, it is the plugin's
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
