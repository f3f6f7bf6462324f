"""Parquet files as streams of records, a few rows at a time.

A value that repeats is in the file once: what a column says it unpacks to is checked before it is read, and what comes
out is counted again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inlay.data.columns import Header
from inlay.data.data_files import RawFile
from inlay.data.streams import Growth, ReadOptions, Stream, check_num_columns, count_letters
from inlay.errors import BadData

BATCH_BYTES = 64_000_000
"""bytes that rows become at once at most, if the largest value is in each of them"""


def open_parquet(file: RawFile, options: ReadOptions) -> Stream:
    """A Parquet file as a stream; a line is a row."""
    import pyarrow
    from pyarrow import parquet

    unreadable = (pyarrow.ArrowException, OSError, ValueError, OverflowError, NotImplementedError)

    def refuse(error: Exception) -> BadData:
        return BadData(f"no readable Parquet file: {error}", "write it again, or use CSV or JSONL", path=file.name)

    try:
        table = parquet.ParquetFile(file.handle)
        # Values that repeat are kept once until they are asked for, a few rows at a time.
        leaves = [table.schema.column(index) for index in range(len(table.schema))]
        texts = [leaf.path for leaf in leaves if leaf.logical_type.type == "STRING"]
        table.close()
        table = parquet.ParquetFile(file.handle, read_dictionary=texts)
    except unreadable as error:
        raise refuse(error) from None
    growth = Growth(file)
    groups = [table.metadata.row_group(index) for index in range(table.metadata.num_row_groups)]
    for group in groups:
        growth.check(
            max((group.column(index).total_uncompressed_size for index in range(group.num_columns)), default=0)
        )

    def records() -> Iterator[dict[str, Any]]:
        try:
            with table:
                for batch in table.iter_batches(batch_size=1024):
                    num_rows = max(1, BATCH_BYTES // max(1, batch.nbytes))
                    for start in range(0, len(batch), num_rows):
                        columns = [_unpack(column.slice(start, num_rows)) for column in batch.columns]
                        for record in pyarrow.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist():
                            growth.add(count_letters(record))
                            yield record
        except unreadable as error:
            raise refuse(error) from None

    names = tuple(table.schema_arrow.names)
    check_num_columns(file.name, names)
    return Stream(Header(file.name, names, None), enumerate(records(), start=1))


def _unpack(column: Any) -> Any:
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
