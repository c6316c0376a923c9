"""Data of one's own, described by a file: which columns are features, which is the target, and what is public of them.

``visits.toml`` beside its Parquet files::

    train = "visits/part-*.parquet"   # a path or a pattern, or a list of them, seen from this file
    test = "visits-2025.parquet"      # may be left out: then a sixth, chosen by a hash of each row, is held out
    holdout = "private"               # or "public", if the test rows are no one's secret

    [target]
    column = "readmitted"
    values = ["no", "yes"]            # the classes, in order; or groups = [[0], [1, 2, 3]]; or kind = "number"
                                      # several yes/no labels: columns = ["cough", "fever"], a column each; or
                                      # column = "findings" with labels = ["cough", "fever"], lists of 0 and 1

    [features.age]
    low = 18                          # a public range: numbers are mapped to [-1, 1], and cut off at its ends
    high = 100
    missing = 55                      # stands for a missing value; without it, one is refused

    [features.ward]
    values = ["surgery", "cardiology", "other"]
    other = "other"                   # stands for every value that is not listed; without it, one is refused

    [features.ecg]
    low = -1
    high = 1
    length = 250                      # lists of so many numbers

    [features."lab *"]                # of all columns of such a name that stand nowhere else
    low = 0
    high = 10

    [features.scan]
    kind = "image"                    # then it is the only feature; encoded, or lists of pixels

Ranges and vocabularies are public constants that a person writes down. Computed from the private rows they would be an
unaccounted release, so nothing here computes them (:func:`raydp.data.drafts.draft` leaves them open).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raydp import _validate
from raydp.data.kinds import Category, Classes, Labels, Number, Quantity
from raydp.errors import CorruptFile, InvalidValue, UnknownName


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a description file says.

    Attributes:
        name: of the file.
        train, test: Parquet files; no test files hold a part of the others out.
        public_holdout: whether the held-out rows may be measured without noise.
        targets: the columns of the target; one, or one a label.
        target_kind: what they hold.
        features: column -> what it holds; or the one column of images.
        image: the column of images, or None.
    """

    name: str
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    public_holdout: bool
    targets: tuple[str, ...]
    target_kind: Classes | Quantity | Labels
    features: Mapping[str, Number | Category]
    image: str | None

    @property
    def num_classes(self) -> int | None:
        """Of the target; None where it is something else."""
        return len(self.target_kind.groups) if isinstance(self.target_kind, Classes) else None

    @property
    def num_labels(self) -> int | None:
        """Yes/no labels of the target; None where it is something else."""
        return len(self.target_kind.names) if isinstance(self.target_kind, Labels) else None

    @property
    def task(self) -> str:
        """What a model of these data is for."""
        if self.num_labels is not None:
            return "multilabel"
        return "regression" if self.num_classes is None else "classification"

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them."""
        return (*self.train, *self.test)


def is_table(path: Path) -> bool:
    """Whether a path is that of a description file, by its suffix."""
    return path.suffix == ".toml"


def read_table(path: Path) -> Table:
    """Read a description file, and check it against the columns of its Parquet files.

    Raises:
        CorruptFile: it is no TOML, or a Parquet file cannot be read.
        UnknownName: a field or a column that does not exist; near names are suggested.
        InvalidValue: a field breaks its rule, no file matches, or a column holds something else than is said.
    """
    record = _parsed(path)
    for key in record:
        _validate.one_of(f"field of {path}", key, ("train", "test", "holdout", "target", "features"))
    for key in ("train", "target", "features"):
        if key not in record:
            raise InvalidValue(str(path), sorted(record), f"must have {key}", "raydp describe FILE drafts one.")
    _validate.one_of(f"{path}: holdout", record.get("holdout", "private"), ("private", "public"))
    targets, kind = _target(path, record["target"])
    features, image = _features(path, record["features"])
    train = _matching(path, "train", record["train"])
    if image is None:
        features = _expanded(path, features, schema_of(train[0]).names, targets)
    for target in targets:
        if target in features or target == image:
            raise InvalidValue(f"{path}: features", target, "is the target", "Leave it out of the features.")
    table = Table(
        name=path.stem,
        train=train,
        test=_matching(path, "test", record["test"]) if "test" in record else (),
        public_holdout=record.get("holdout", "private") == "public",
        targets=targets,
        target_kind=kind,
        features=features,
        image=image,
    )
    for file in table.files:
        _check_columns(file, table)
    return table


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValue("data", str(path), "must be a readable file", f"{error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path} is not a TOML file: {error}. Correct it.") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = text.splitlines()[int(place[1]) - 1].strip() if place else ""
        hint = f"Write what is publicly known after the = of {line!r}" if line.endswith("=") else "Correct it"
        raise CorruptFile(f"{path} is not a TOML file: {error}: {line!r}. {hint}.") from error


def _expanded(
    path: Path, features: Mapping[str, Number | Category], columns: Sequence[str], targets: tuple[str, ...]
) -> dict[str, Number | Category]:
    """With each pattern replaced by the columns that it matches and that no other feature, nor the target, is."""
    free = [column for column in columns if column not in features and column not in targets]
    found: dict[str, Number | Category] = {}
    for name, kind in features.items():
        if "*" not in name or name in columns:
            found[name] = kind
            continue
        matched = [column for column in free if fnmatchcase(column, name)]
        if not matched:
            raise InvalidValue(
                f"{path}: features", name, f"matches none of the columns that are left: {free}", "Correct the pattern."
            )
        found.update(dict.fromkeys(matched, kind))
        free = [column for column in free if column not in matched]
    return found


def _target(path: Path, record: Any) -> tuple[tuple[str, ...], Classes | Quantity | Labels]:
    where = f"{path}: target"
    found = _fields(where, record, ("column", "columns", "kind", "labels", "values", "groups", "low", "high"))
    if "columns" in found or "labels" in found:
        return _labels(where, found)
    column = found.get("column")
    if not isinstance(column, str):
        raise InvalidValue(f"{where}.column", column, "must name a column", 'Write column = "label".')
    kind = _validate.one_of(f"{where}.kind", found.get("kind", "classes"), ("classes", "number"))
    try:
        if kind == "number":
            return (column,), Quantity(low=found["low"], high=found["high"])
        groups = found["groups"] if "groups" in found else [[value] for value in found["values"]]
        return (column,), Classes(groups=tuple(tuple(group) for group in groups))
    except (KeyError, TypeError):
        wanted = "low and high" if kind == "number" else "values = [first, second, …] or groups = [[…], […]]"
        raise InvalidValue(where, sorted(found), f"needs {wanted}", "Write what is publicly known of it.") from None


def _labels(where: str, found: dict[str, Any]) -> tuple[tuple[str, ...], Labels]:
    """Several yes/no labels: ``columns``, or ``column`` with ``labels``."""
    listed = "labels" in found
    for key in found:
        _validate.one_of(f"field of {where}, several labels", key, ("column", "columns", "labels", "values"))
    if listed == ("columns" in found) or listed != isinstance(found.get("column"), str):
        raise InvalidValue(
            where,
            sorted(found),
            "must name the columns of several labels, or one column and the labels in its lists",
            'Write columns = ["a", "b"], or column = "findings" with labels = ["a", "b"].',
        )
    try:
        kind = Labels(names=found["labels" if listed else "columns"], values=found.get("values"), listed=listed)
    except InvalidValue as error:
        raise InvalidValue(f"{where}.{error.field}", error.value, error.rule, error.remedy) from None
    if not all(isinstance(name, str) for name in kind.names):
        raise InvalidValue(where, list(kind.names), "must be names", 'Write them as texts: ["a", "b"].')
    return ((found["column"],) if listed else kind.names), kind


def _features(path: Path, record: Any) -> tuple[dict[str, Number | Category], str | None]:
    where = f"{path}: features"
    if not isinstance(record, Mapping) or not record:
        raise InvalidValue(where, record, "must name one column or more", "Write [features.COLUMN].")
    features: dict[str, Number | Category] = {}
    for column, given in record.items():
        found = _fields(f"{where}.{column}", given, ("kind", "low", "high", "missing", "length", "values", "other"))
        kind = found.pop("kind", "category" if "values" in found else "number")
        _validate.one_of(f"{where}.{column}.kind", kind, ("number", "category", "image"))
        if kind == "image":
            if len(record) > 1:
                raise InvalidValue(f"{where}.{column}", "image", "must be the only feature", "Remove the others.")
            return {}, str(column)
        maker: Callable[..., Number | Category] = Number if kind == "number" else Category
        known = [item.name for item in fields(Number if kind == "number" else Category)]
        for name in found:
            _validate.one_of(f"field of {where}.{column}, a {kind}", name, known)
        try:
            features[column] = maker(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})
        except TypeError:
            wanted = "low and high" if maker is Number else "values"
            raise InvalidValue(f"{where}.{column}", sorted(found), f"needs {wanted}", "Write them down.") from None
        except InvalidValue as error:
            raise InvalidValue(f"{where}.{column}.{error.field}", error.value, error.rule, error.remedy) from None
    return features, None


def _fields(where: str, record: Any, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        raise InvalidValue(where, record, "must be a table of fields", f"Write [{where.rpartition(': ')[2]}].")
    for key in record:
        _validate.one_of(f"field of {where}", key, known)
    return dict(record)


def _matching(path: Path, field: str, patterns: Any) -> tuple[Path, ...]:
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not isinstance(pattern, str):
            raise InvalidValue(f"{path}: {field}", pattern, "must be a path", f'Write {field} = "part-*.parquet".')
        base = Path(pattern).expanduser()
        root, rest = (
            (Path(base.anchor), str(base.relative_to(base.anchor))) if base.is_absolute() else (path.parent, str(base))
        )
        files = sorted(file.resolve() for file in root.glob(rest))
        if not files:
            raise InvalidValue(
                f"{path}: {field}", pattern, f"matches no file, seen from {path.parent.resolve()}", "Correct the path."
            )
        found += files
    if len(set(found)) < len(found) or not found:
        raise InvalidValue(f"{path}: {field}", patterns, "must name each file once", "Correct the patterns.")
    return tuple(found)


def schema_of(file: Path) -> pa.Schema:
    """Names and types of the columns of a Parquet file. Raises CorruptFile where it cannot be read."""
    try:
        return pq.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise CorruptFile(f"{file} is not a readable Parquet file: {said}. Fetch or write it again.") from error


def _check_columns(file: Path, table: Table) -> None:
    schema = schema_of(file)
    for column in (*table.targets, *table.features, *([table.image] if table.image else [])):
        if column not in schema.names:
            raise UnknownName(f"column of {file}", column, schema.names)
    _check_target(file, table, schema)
    for column, kind in table.features.items():
        stored = schema.field(column).type
        listed = is_list(stored)
        inner = stored.value_type if listed else stored
        if pa.types.is_dictionary(inner):
            inner = inner.value_type
        numeric = pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)
        if isinstance(kind, Number) and (not numeric or listed != (kind.length is not None)):
            wanted = "numbers" if kind.length is None else f"lists of {kind.length} numbers"
            raise InvalidValue(
                f"{file}: column {column}",
                str(stored),
                f"must hold {wanted}, as {table.name}.toml says",
                "Name its length for lists, or its values for categories.",
            )


def _check_target(file: Path, table: Table, schema: pa.Schema) -> None:
    """Floats are no classes unless the classes are floats; labels are lists exactly where they are said to be."""
    kind = table.target_kind
    for column in table.targets:
        stored = schema.field(column).type
        if isinstance(kind, Classes) and pa.types.is_floating(stored) and not isinstance(kind.groups[0][0], float):
            raise InvalidValue(
                f"{file}: column {column}",
                str(stored),
                f"holds floats, and {table.name}.toml names classes of type {type(kind.groups[0][0]).__name__}",
                'Cast it to integers, write the classes as floats (0.0, 1.0), or predict numbers: kind = "number".',
            )
        if isinstance(kind, Labels) and is_list(stored) != kind.listed:
            wanted = "lists, one entry a label" if kind.listed else "one yes or no an example"
            raise InvalidValue(
                f"{file}: column {column}",
                str(stored),
                f"must hold {wanted}, as {table.name}.toml says",
                'Write columns = ["a", "b"] for a column a label, column and labels for a column of lists.',
            )


def is_list(kind: pa.DataType) -> bool:
    """Whether each value of a column is a list."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


__all__ = ["Table", "is_list", "is_table", "read_table", "schema_of"]
