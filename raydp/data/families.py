"""Families of private sets with a public companion, as :func:`raydp.data.neighbours.write_family` leaves them.

Each member is a private data set of its own, with a budget of its own. Its metrics are measured against its own images,
which are private: they say how the experiment went, and are no private release.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from raydp.errors import CorruptFile, InvalidValue

MEMBERS, PUBLIC, SETS, ABOUT = "members", "public.parquet", "public_sets.parquet", "family.json"


def is_member(path: Path) -> bool:
    """Whether a file is a member of a family."""
    return path.parent.name == MEMBERS and (path.parent.parent / ABOUT).is_file()


def is_family(path: Path) -> bool:
    """Whether a directory is a family."""
    return (path / ABOUT).is_file() and (path / MEMBERS).is_dir()


def member_file(family: Path, member: int) -> Path:
    """The file of a member.

    Raises:
        InvalidValue: the family has no such member.
    """
    file = family / MEMBERS / f"{member:04d}.parquet"
    if not file.is_file():
        count = len(list((family / MEMBERS).glob("*.parquet")))
        rule = f"must be one of the {count} members of {family}"
        raise InvalidValue("member", member, rule, f"Choose 0 … {count - 1}; a search's seeds are members.")
    return file


def classes_of(member: Path) -> int:
    """The number of classes of the images that the family was made of."""
    record = json.loads((member.parent.parent / ABOUT).read_text(encoding="utf-8"))
    return int(record["classes"])


def read_sets(public: Path) -> Tensor | None:
    """int64 (M, n), the public sets beside a family's public file; None where there are none.

    Raises:
        CorruptFile: the file is damaged.
    """
    file = public.parent / SETS
    if public.name != PUBLIC or not file.is_file():
        return None
    try:
        column = pq.read_table(file).column("positions").combine_chunks()
        rows = torch.from_numpy(column.flatten().to_numpy().copy())
        return rows.view(len(column), -1)
    except (pa.ArrowException, OSError, KeyError, RuntimeError) as error:
        raise CorruptFile(f"{file} does not hold public sets. Write the family again.") from error
