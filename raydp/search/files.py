"""Search files: Python files that define a ``search``, or several in ``searches``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from raydp import _validate
from raydp.errors import InvalidValue, RaydpError, UnknownName
from raydp.search.definition import Search


class SearchFileError(RaydpError):
    """A search file cannot be run: its own line and message are named."""


def load_searches(file: Path, *, only: str | None = None) -> dict[str, Search]:
    """The searches that a Python file defines, by name, in the order in which they are written.

    The file is run under a module name of its own, with its directory importable meanwhile. It defines either
    ``search`` (a :class:`raydp.Search`) or ``searches`` (a list of them, or a dictionary name -> Search); where both
    exist, ``searches`` counts.

    Args:
        file: path of the file.
        only: the name of the one search that is wanted.

    Raises:
        SearchFileError: the file is missing, raises, or defines no search; the line of the file is named.
        InvalidValue: something else than a Search stands in its place, or two searches share a name.
        UnknownName: ``only`` names no search of the file.
    """
    searches = _collect(_run(file), file)
    if only is None:
        return searches
    if only not in searches:
        raise UnknownName("--only", only, searches)
    return {only: searches[only]}


def _run(file: Path) -> ModuleType:
    """Execute the file as a module."""
    path = file.expanduser().resolve()
    if not path.is_file():
        raise SearchFileError(f"{file}: there is no such file. Give the path of a Python file that defines `search`.")
    name = f"raydp_search_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SearchFileError(f"{file}: is not a Python file. Give a file whose name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise SearchFileError(_where(file, path, error)) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _where(file: Path, path: Path, error: Exception) -> str:
    """``FILE, line 7: <the line>: <the message>``, with the last line of the file itself that was running."""
    message = str(error) if isinstance(error, RaydpError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{file}, line {error.lineno}: {(error.text or '').strip()!r}: {error.msg}."
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{file}, line {own[-1].lineno}: {own[-1].line!r}: {message}" if own else f"{file}: {message}"


def _collect(module: ModuleType, file: Path) -> dict[str, Search]:
    several = getattr(module, "searches", None)
    if several is None:
        one = getattr(module, "search", None)
        if one is None:
            raise SearchFileError(
                f"{file}: defines neither `search` nor `searches`. Write search = raydp.Search(...) in it."
            )
        return {_checked("search", one).name: one}
    if not isinstance(several, Mapping | list | tuple) or not several:
        raise InvalidValue("searches", several, "must be a list or a dictionary of searches", "Write searches = [...].")
    if isinstance(several, Mapping):
        named = [(name, _checked(f"searches[{name!r}]", search)) for name, search in several.items()]
    else:
        listed = [_checked(f"searches[{index}]", search) for index, search in enumerate(several)]
        named = [(search.name, search) for search in listed]
    found: dict[str, Search] = {}
    for name, search in named:
        _validate.name("searches", name)
        if name in found:
            raise InvalidValue("searches", name, "is the name of two searches", "Give each search its own name.")
        found[name] = search
    return found


def _checked(where: str, value: object) -> Search:
    if not isinstance(value, Search):
        raise InvalidValue(where, value, "must be a raydp.Search", f"Write {where} = raydp.Search(...).")
    return value
