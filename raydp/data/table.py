"""Data of one's own, described by a file: which columns are features, which is the target, and what is public of them.

``visits.toml`` beside its Parquet files::

    train = "visits/part-*.parquet"   # a path or a pattern, or a list of them, seen from this file
    test = "visits-2025.parquet"      # may be left out: then a sixth, chosen by a hash of each row, is held out
    holdout = "private"               # or "public", if the test rows are no one's secret

    [target]
    column = "readmitted"
    values = ["no", "yes"]            # the classes, in order; or groups = [[0], [1, 2, 3]]; or kind = "number"

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

    [features.scan]
    kind = "image"                    # then it is the only feature; encoded, or lists of pixels

Ranges and vocabularies are public constants that a person writes down. Computed from the private rows they would be an
unaccounted release, so nothing here computes them (:func:`draft` leaves them open).
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue, UnknownName

Value = str | int | float | bool
_LARGEST_MAGNITUDE = 1e30


@dataclass(frozen=True, kw_only=True)
class Number:
    """A feature of one number, or of a list of ``length`` numbers, with a public range.

    Attributes:
        low, high: of the range; values beyond are cut off.
        missing: stands for a missing value; None refuses one.
        length: of the lists; None for single numbers.
    """

    low: float
    high: float
    missing: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            _validate.between(name, getattr(self, name), -_LARGEST_MAGNITUDE, _LARGEST_MAGNITUDE)
        if not self.low < self.high:
            raise InvalidValue(
                "high", self.high, f"must exceed low = {self.low}", "Give the public range of the column."
            )
        if self.missing is not None:
            _validate.between("missing", self.missing, self.low, self.high)
        if self.length is not None:
            _validate.integer("length", self.length, low=1)

    @property
    def width(self) -> int:
        """Model inputs that it makes."""
        return self.length or 1


@dataclass(frozen=True, kw_only=True)
class Category:
    """A feature out of a public vocabulary; each value is an input of its own, 0 or 1.

    Attributes:
        values: the vocabulary, of one type.
        other: the one that stands for values that are not listed, and for missing ones; None refuses them.
    """

    values: tuple[Value, ...]
    other: Value | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _vocabulary("values", self.values))
        if self.other is not None and self.other not in self.values:
            raise InvalidValue("other", self.other, f"must be one of values = {list(self.values)}", "Add it there.")

    @property
    def width(self) -> int:
        """Model inputs that it makes."""
        return len(self.values)


@dataclass(frozen=True, kw_only=True)
class Classes:
    """A target of classes: class i is any of the values ``groups[i]``."""

    groups: tuple[tuple[Value, ...], ...]

    def __post_init__(self) -> None:
        if len(self.groups) < 2:
            raise InvalidValue("target.values", self.groups, "must name two classes or more", "Name them in order.")
        _vocabulary("target.groups", tuple(value for group in self.groups for value in group))


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A target of numbers with a public range, mapped to [-1, 1] and cut off at its ends; metrics are on that scale."""

    low: float
    high: float

    def __post_init__(self) -> None:
        Number(low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a description file says.

    Attributes:
        name: of the file.
        train, test: Parquet files; no test files hold a part of the others out.
        public_holdout: whether the held-out rows may be measured without noise.
        target: its column, and what it holds.
        features: column -> what it holds; or the one column of images.
        image: the column of images, or None.
    """

    name: str
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    public_holdout: bool
    target: str
    target_kind: Classes | Quantity
    features: Mapping[str, Number | Category]
    image: str | None

    @property
    def num_classes(self) -> int | None:
        """Of the target; None where it is a number."""
        return len(self.target_kind.groups) if isinstance(self.target_kind, Classes) else None

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
    try:
        with open(path, "rb") as stream:
            record = tomllib.load(stream)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path} is not a TOML file: {error}. Correct it.") from error
    except OSError as error:
        raise InvalidValue("data", str(path), "must be a readable file", f"{error.strerror}.") from error
    for key in record:
        _validate.one_of(f"field of {path}", key, ("train", "test", "holdout", "target", "features"))
    for key in ("train", "target", "features"):
        if key not in record:
            raise InvalidValue(str(path), sorted(record), f"must have {key}", "raydp describe FILE drafts one.")
    _validate.one_of(f"{path}: holdout", record.get("holdout", "private"), ("private", "public"))
    target, kind = _target(path, record["target"])
    features, image = _features(path, record["features"])
    if target in features or target == image:
        raise InvalidValue(f"{path}: features", target, "is the target", "Leave it out of the features.")
    table = Table(
        name=path.stem,
        train=_matching(path, "train", record["train"]),
        test=_matching(path, "test", record["test"]) if "test" in record else (),
        public_holdout=record.get("holdout", "private") == "public",
        target=target,
        target_kind=kind,
        features=features,
        image=image,
    )
    for file in table.files:
        _check_columns(file, table)
    return table


def draft(files: Sequence[Path], target: str | None = None) -> str:
    """A description of Parquet files to fill in: their columns and types, and no number computed from a row.

    Raises:
        UnknownName: there is no such target column.
    """
    schema = _schema(files[0])
    names = [name for name in schema.names if not name.startswith("__")]
    chosen = target if target is not None else names[-1]
    if chosen not in names:
        raise UnknownName("target", chosen, names)
    train = str(files[0]) if len(files) == 1 else [str(file) for file in files]
    lines = [
        "# Ranges and vocabularies are public: write down what is known of the column, not what stands in the rows.",
        f"train = {_toml(train)}",
        '# test = "test.parquet"     # without it, a sixth of the rows is held out',
        'holdout = "private"         # "public" only if the held-out rows are no one\'s secret',
        "",
        "[target]",
        f"column = {_toml(chosen)}",
    ]
    if pa.types.is_floating(schema.field(chosen).type):
        lines += ['kind = "number"', "low =", "high ="]
    else:
        lines += ["values = []               # the classes, in order"]
    for name in names:
        if name != chosen:
            lines += ["", f"[features.{_toml(name)}]", *_draft_of(schema.field(name).type)]
    return "\n".join(lines) + "\n"


def _draft_of(kind: pa.DataType) -> list[str]:
    if pa.types.is_struct(kind) or pa.types.is_binary(kind):
        return ['kind = "image"            # then remove the other features']
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return ["low =", "high =", "# missing = 0              # stands for a missing value"]
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return ["low =", "high =", "length ="]
    return ["values = []", '# other = "other"          # stands for values that are not listed']


def _target(path: Path, record: Any) -> tuple[str, Classes | Quantity]:
    where = f"{path}: target"
    found = _fields(where, record, ("column", "kind", "values", "groups", "low", "high"))
    column = found.get("column")
    if not isinstance(column, str):
        raise InvalidValue(f"{where}.column", column, "must name a column", 'Write column = "label".')
    kind = _validate.one_of(f"{where}.kind", found.get("kind", "classes"), ("classes", "number"))
    try:
        if kind == "number":
            return column, Quantity(low=found["low"], high=found["high"])
        groups = found["groups"] if "groups" in found else [[value] for value in found["values"]]
        return column, Classes(groups=tuple(tuple(group) for group in groups))
    except (KeyError, TypeError):
        wanted = "low and high" if kind == "number" else "values = [first, second, …] or groups = [[…], […]]"
        raise InvalidValue(where, sorted(found), f"needs {wanted}", "Write what is publicly known of it.") from None


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


def _vocabulary(field: str, values: Any) -> tuple[Value, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise InvalidValue(field, values, "must be a list of values", 'Write values = ["a", "b"].')
    for value in values:
        if not isinstance(value, (str, int, float, bool)) or (isinstance(value, float) and not math.isfinite(value)):
            raise InvalidValue(field, value, "must be texts, numbers or true and false", "Write them out.")
    if len({type(value) for value in values}) > 1 or len(set(values)) < len(values):
        raise InvalidValue(field, list(values), "must be of one type, each once", "Write each value once.")
    return tuple(values)


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


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise CorruptFile(f"{file} is not a readable Parquet file: {said}. Fetch or write it again.") from error


def _check_columns(file: Path, table: Table) -> None:
    schema = _schema(file)
    for column in (table.target, *table.features, *([table.image] if table.image else [])):
        if column not in schema.names:
            raise UnknownName(f"column of {file}", column, schema.names)
    for column, kind in table.features.items():
        stored = schema.field(column).type
        is_list = pa.types.is_list(stored) or pa.types.is_large_list(stored) or pa.types.is_fixed_size_list(stored)
        inner = stored.value_type if is_list else stored
        if pa.types.is_dictionary(inner):
            inner = inner.value_type
        numeric = pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)
        if isinstance(kind, Number) and (not numeric or is_list != (kind.length is not None)):
            wanted = "numbers" if kind.length is None else f"lists of {kind.length} numbers"
            raise InvalidValue(
                f"{file}: column {column}",
                str(stored),
                f"must hold {wanted}, as {table.name}.toml says",
                "Name its length for lists, or its values for categories.",
            )


def _toml(value: str | list[str]) -> str:
    return json.dumps(value, ensure_ascii=False)  # JSON's texts and lists of texts are TOML's


__all__ = ["Category", "Classes", "Number", "Quantity", "Table", "draft", "is_table", "read_table"]
