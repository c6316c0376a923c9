"""Arrow streams, as ``datasets.save_to_disk`` writes them, read as Parquet files are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

#: Suffix of such a file.
ARROW = ".arrow"


class ArrowStream:
    """An Arrow stream with what :mod:`raydp.data.parquet` uses of ``pyarrow.parquet.ParquetFile``.

    Its batches are views of the memory map that it is read from.
    """

    num_row_groups = 1

    def __init__(self, source: pa.NativeFile) -> None:
        self._table = pa.ipc.open_stream(source).read_all()
        self.schema_arrow: pa.Schema = self._table.schema

    @property
    def metadata(self) -> Any:
        """Has ``num_rows``, as the metadata of a Parquet file has."""
        return self._table

    def iter_batches(
        self, *, batch_size: int, row_groups: Sequence[int], columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of some columns, at most ``batch_size`` at a time."""
        yield from self._table.select(list(columns)).to_batches(max_chunksize=batch_size)


__all__ = ["ARROW", "ArrowStream"]
