"""A first description of a table (:mod:`raydp.data.table`), for a person to fill in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from raydp.data.table import is_list, schema_of
from raydp.errors import UnknownName


def draft(files: Sequence[Path], target: str | None = None) -> str:
    """A description of Parquet files to fill in: their columns and types, and no number computed from a row.

    Raises:
        UnknownName: there is no such target column.

    >>> import pathlib
    >>> import pyarrow as pa
    >>> import pyarrow.parquet as pq
    >>> from raydp.data.drafts import draft
    >>> pq.write_table(pa.table({"age": [30, 40], "readmitted": ["no", "yes"]}), "visits.parquet")
    >>> text = draft([pathlib.Path("visits.parquet")], "readmitted")
    >>> [line for line in text.splitlines() if line.startswith("[")]
    ['[target]', '[features."age"]']
    """
    schema = schema_of(files[0])
    names = [name for name in schema.names if not name.startswith("__")]
    chosen = target if target is not None else names[-1]
    if chosen not in names:
        raise UnknownName("target", chosen, names)
    train = str(files[0]) if len(files) == 1 else [str(file) for file in files]
    lines = [
        "# Ranges and vocabularies are public: write down what is known of the column, not what stands in the rows.",
        '# Columns that have one in common can share it: [features."lab *"]',
        f"train = {_toml(train)}",
        '# test = "test.parquet"     # without it, a sixth of the rows is held out',
        'holdout = "private"         # "public" only if the held-out rows are no one\'s secret',
        "",
        "[target]",
        f"column = {_toml(chosen)}",
    ]
    if pa.types.is_floating(schema.field(chosen).type):
        lines += ['kind = "number"', "low =", "high ="]
    elif is_list(schema.field(chosen).type):
        lines += ["labels = []               # names of the yes/no labels in its lists, in order"]
    else:
        lines += ['values = []               # the classes, in order; for several labels, columns = ["a", "b"]']
    for name in names:
        if name != chosen:
            lines += ["", f"[features.{_toml(name)}]", *_draft_of(schema.field(name).type)]
    return "\n".join(lines) + "\n"


def _draft_of(kind: pa.DataType) -> list[str]:
    if pa.types.is_struct(kind) or pa.types.is_binary(kind):
        return ['kind = "image"            # then remove the other features']
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return ["low =", "high =", "# missing = 0              # stands for a missing value"]
    if is_list(kind):
        return ["low =", "high =", "length ="]
    return ["values = []", '# other = "other"          # stands for values that are not listed']


def _toml(value: str | list[str]) -> str:
    return json.dumps(value, ensure_ascii=False)  # JSON's texts and lists of texts are TOML's


__all__ = ["draft"]
