"""Where the files of a data set lie: in raydp's plain layout, the Hugging Face Hub's, or ``save_to_disk``'s.

* plain: ``train.parquet`` beside ``test.parquet`` (or ``validation.parquet``, ``val.parquet``);
* the Hub: shards such as ``data/train-00000-of-00002.parquet`` or ``plain_text/train-…``, or a directory a split
  (``plain_text/train/0000.parquet``), beside a ``README.md`` whose YAML head may name configurations and classes;
* what ``datasets.save_to_disk`` wrote: ``train/data-00000-of-00001.arrow`` with ``state.json``.

Files are read by pyarrow; the ``datasets`` package is not needed. Where there is no test split, the validation split is
held out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raydp.errors import CorruptFile, InvalidValue

#: Splits that metrics are measured on; the first that exists.
HELD_OUT = ("test", "validation", "valid", "val", "dev")
_SHARD = re.compile(r"(?P<split>\w+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.parquet")
_README = "README.md"
_SHOWN = 10  # names in a message


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a data set of labelled images, in order.

    Attributes:
        train, test: Parquet or Arrow files; no test files hold a sixth of the others out.
        image, label: their columns, where a README names them.
        names: of the classes, where a README names them.
    """

    train: tuple[Path, ...]
    test: tuple[Path, ...] = ()
    image: str | None = None
    label: str | None = None
    names: tuple[str, ...] | None = None

    @property
    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Times and sizes: rewriting a file makes its last loaded content stale."""
        return tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in (*self.train, *self.test))


def files_of(path: Path) -> Files:
    """The files of a path: a file itself, or those of a directory in one of the layouts above.

    Raises:
        InvalidValue: the directory has another layout, lacks a shard, or holds several configurations; the message
            says which to name. CorruptFile: a README or a JSON file in it cannot be read.
    """
    path = path.resolve()
    if path.is_file():
        return Files(train=(path,))
    if (path / "train.parquet").exists():
        others = [path / f"{name}.parquet" for name in HELD_OUT]
        return Files(train=(path / "train.parquet",), test=tuple(file for file in others if file.exists())[:1])
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved(path)
    head = _head(path)
    splits = _configured(path, head) or _splits(path)
    if "train" not in splits:
        held_names = sorted(file.name for file in path.iterdir())[:_SHOWN]
        raise InvalidValue(
            "data",
            str(path),
            f"must hold train.parquet, or shards such as data/train-00000-of-00002.parquet, but holds {held_names}",
            "Name the file itself, or describe files of other names (raydp describe FILES > NAME.toml).",
        )
    image, label, names = _columns(head, path.name)
    held = next((splits[name] for name in HELD_OUT if name in splits), ())
    return Files(train=splits["train"], test=held, image=image, label=label, names=names)


def _splits(path: Path) -> dict[str, tuple[Path, ...]]:
    """The Parquet files of each split, below a directory or its one configuration."""
    for directory in (path, path / "data"):
        if found := _splits_in(directory):
            return found
    configurations = {child.name: _splits_in(child) for child in sorted(path.iterdir()) if child.is_dir()}
    configurations = {name: found for name, found in configurations.items() if "train" in found}
    if len(configurations) > 1:
        raise _several(path, list(configurations))
    return next(iter(configurations.values()), {})


def _splits_in(directory: Path) -> dict[str, tuple[Path, ...]]:
    if not directory.is_dir():
        return {}
    shards: dict[str, list[Path]] = {}
    for file in sorted(directory.glob("*-of-*.parquet")):
        if match := _SHARD.fullmatch(file.name):
            shards.setdefault(match["split"], []).append(file)
    for name in ("train", *HELD_OUT):
        if name not in shards and (files := sorted((directory / name).glob("*.parquet"))):
            shards[name] = files
    for split, files in shards.items():
        _refuse_missing(directory, split, files)
    return {split: tuple(files) for split, files in shards.items()}


def _refuse_missing(directory: Path, split: str, files: Sequence[Path]) -> None:
    found = [match for file in files if (match := _SHARD.fullmatch(file.name))]
    counts = {int(match["count"]) for match in found}
    wanted = {index for count in counts for index in range(count)}
    missing = sorted(wanted - {int(match["index"]) for match in found})
    if len(counts) > 1 or missing:
        rule = f"must be all of one set of shards; shard {missing[0]} is missing" if missing else "must be of one set"
        names = [file.name for file in files][:_SHOWN]
        raise InvalidValue(f"{directory}: {split}", names, rule, "Fetch the data set again.")


def _configured(path: Path, head: Mapping[str, Any]) -> dict[str, tuple[Path, ...]]:
    """The files that a README's head names for each split; none where it names no patterns."""
    given = [each for each in _listed(head.get("configs")) if isinstance(each.get("data_files"), list)]
    if not given:
        return {}
    default = [each for each in given if each.get("default") or each.get("config_name") == "default"]
    chosen = given if len(given) == 1 else default
    if len(chosen) != 1:
        raise _several(path, [str(each.get("config_name")) for each in given])
    found: dict[str, tuple[Path, ...]] = {}
    for entry in _listed(chosen[0]["data_files"]):
        patterns = entry.get("path", ())
        files = [
            file
            for pattern in ([patterns] if isinstance(patterns, str) else patterns)
            for file in sorted(path.glob(str(pattern)))
            if file.suffix == ".parquet"
        ]
        if files:
            found[str(entry.get("split"))] = tuple(dict.fromkeys(files))
    for split, files_ in found.items():
        _refuse_missing(path, split, files_)
    return found


def _several(path: Path, names: Sequence[str]) -> InvalidValue:
    return InvalidValue(
        "data",
        str(path),
        f"holds several configurations: {', '.join(names[:_SHOWN])}",
        f"Name the directory of one ({path / names[0]}), or describe its files: raydp.data.table.",
    )


def _saved(path: Path) -> Files:
    """What ``datasets.save_to_disk`` wrote: of one split, or of several."""
    if (path / "state.json").exists():
        return Files(train=_arrow_files(path))
    splits = _json(path / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or "train" not in splits:
        raise InvalidValue(f"{path / 'dataset_dict.json'}: splits", splits, "must name train", "Rename the split.")
    held = next((name for name in HELD_OUT if name in splits), None)
    return Files(train=_arrow_files(path / "train"), test=_arrow_files(path / held) if held else ())


def _arrow_files(directory: Path) -> tuple[Path, ...]:
    state = directory / "state.json"
    listed = _json(state).get("_data_files")
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise CorruptFile(f"{state} names no data files. Save the data set again, or write ds.to_parquet(…).")
    files = tuple(directory / str(each.get("filename")) for each in listed)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CorruptFile(f"{directory} lacks {', '.join(missing[:_SHOWN])}, which state.json names. Save it again.")
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}. Save the data set again.") from error
    if not isinstance(record, dict):
        raise CorruptFile(f"{path} holds no JSON object. Save the data set again.")
    return record


def _head(path: Path) -> Mapping[str, Any]:
    """The YAML head of the README of a data set, or of the one that a configuration lies in; empty without one."""
    file = next((place / _README for place in (path, path.parent) if (place / _README).is_file()), None)
    if file is None:
        return {}
    try:
        parts = re.split(r"^---\s*$", file.read_text(encoding="utf-8"), maxsplit=2, flags=re.MULTILINE)
        head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise CorruptFile(f"{file}: its YAML head cannot be read: {said}. Correct or remove it.") from error
    return head if isinstance(head, dict) else {}


def _columns(head: Mapping[str, Any], configuration: str) -> tuple[str | None, str | None, tuple[str, ...] | None]:
    """The image column, the label column and the class names that a head states, each if there is exactly one."""
    infos = _listed(head.get("dataset_info"))
    if len(infos) > 1:
        infos = [info for info in infos if info.get("config_name") == configuration]
    features = _listed(infos[0].get("features")) if len(infos) == 1 else []
    images = [str(each.get("name")) for each in features if each.get("dtype") == "image"]
    labels = {
        str(each.get("name")): each["dtype"]["class_label"]
        for each in features
        if isinstance(each.get("dtype"), dict) and "class_label" in each["dtype"]
    }
    if len(labels) != 1:
        return (images[0] if len(images) == 1 else None), None, None
    ((label, stated),) = labels.items()
    named = stated.get("names") if isinstance(stated, dict) else None
    if isinstance(named, dict):
        named = [named[key] for key in sorted(named, key=lambda key: int(key) if str(key).isdigit() else -1)]
    names = tuple(map(str, named)) if isinstance(named, list) and named else None
    return (images[0] if len(images) == 1 else None), label, names


def _listed(value: Any) -> list[dict[str, Any]]:
    """The mappings of a list, or of one alone."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]


__all__ = ["HELD_OUT", "Files", "files_of"]
