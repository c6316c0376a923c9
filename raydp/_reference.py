"""Objects of the user's own, named as ``path/to/file.py:name`` or ``package.module:name``.

A file is read by its path, so it must lie at the same path on every node; a module must be importable there. Nothing of
a name is run before it is asked for, and what it names is trusted as the search file itself is.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from raydp.errors import InvalidValue, UnknownName

_FORM = re.compile(r"(?P<module>[^:]+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


def is_reference(text: str) -> bool:
    """Whether the text has one of the two forms."""
    return _FORM.fullmatch(text) is not None


def absolute(text: str) -> str:
    """The reference with its file, if it names one, as an absolute path: other processes have other directories."""
    module, _, name = text.rpartition(":")
    return f"{Path(module).expanduser().resolve()}:{name}" if module.endswith(".py") else text


def reference_to(field: str, function: Any) -> str:
    """The text that names a function or class, so that other processes find it.

    Raises:
        InvalidValue: it has no name that can be imported: a lambda, an inner function, or one of a notebook's cells or
            of the script that runs.
    """
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    remedy = "Write it into a file, and name it: 'FILE.py:NAME' (in a notebook, %%writefile FILE.py does so)."
    if module is None or not name.isidentifier() or getattr(module, name, None) is not function:
        raise InvalidValue(field, repr(function), "cannot be imported by other processes under its name", remedy)
    if module.__name__ == "__main__":
        raise InvalidValue(field, name, "stands in the program that runs, which other processes cannot import", remedy)
    # A file outside packages may lie where other processes do not look, and a search file's module has a made-up name.
    if "." in module.__name__ or file is None:
        return f"{module.__name__}:{name}"
    return f"{Path(file).resolve()}:{name}"


def resolve(field: str, text: str) -> Any:
    """What a reference names.

    Args:
        field: of the search, for messages.

    Raises:
        UnknownName: no such file, module or name; near names are suggested.
        InvalidValue: the file or module cannot be run.
    """
    module_name, _, name = text.rpartition(":")
    module = _module(field, text, module_name)
    if not hasattr(module, name):
        raise UnknownName(
            f"{field} (a name in {module_name})", name, [n for n in vars(module) if not n.startswith("_")]
        )
    return getattr(module, name)


def digest(field: str, text: str) -> str:
    """SHA-256 (hex) of the source of the file or module that a reference names. What it imports is not covered."""
    module_name = text.rpartition(":")[0]
    origin = _module(field, text, module_name).__file__
    return hashlib.sha256(Path(origin).read_bytes() if origin else module_name.encode()).hexdigest()


def _module(field: str, text: str, name: str) -> ModuleType:
    try:
        return _from_file(field, name) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidValue(
                field,
                text,
                f"names the module {name}, which Python does not find",
                "Install it on every node, or name its file: path/to/file.py:name.",
            ) from None
        raise _broken(field, text, error) from error
    except Exception as error:
        if isinstance(error, (InvalidValue, UnknownName)):
            raise
        raise _broken(field, text, error) from error


def _broken(field: str, text: str, error: Exception) -> InvalidValue:
    said = (str(error).splitlines() or [""])[0]
    return InvalidValue(field, text, f"cannot be imported: {type(error).__name__}: {said}", "Correct the file.")


def _from_file(field: str, name: str) -> ModuleType:
    """The module of a file, run once a process as long as the file does not change."""
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        near = [str(file.name) for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UnknownName(f"{field} (a file, seen from {Path.cwd()})", name, near)
    content = path.read_bytes()
    key = f"raydp_own_{path.stem}_{hashlib.sha256(str(path).encode() + content).hexdigest()[:16]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    sys.path.insert(0, str(path.parent))  # as for a script: its neighbours can be imported
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module
