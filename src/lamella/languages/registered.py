"""Import every module of this package, so that each language registers itself."""

from __future__ import annotations

import importlib
import pkgutil

from lamella import languages

for _module in pkgutil.iter_modules(languages.__path__):
    importlib.import_module(f"{languages.__name__}.{_module.name}")
