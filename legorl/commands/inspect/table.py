"""Rows as text: an aligned table for people, JSON or CSV for programs.

What was not measured (null) is `-` in a table, null in JSON, empty in CSV; it is never 0. Everything that came from a
sandbox or a model is escaped before it is shown in a table.
"""

import csv
import datetime
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from legorl.options import printable

NULL = "-"
SAMPLE = 1000  # rows that settle the widths of the columns; the rest is printed as it comes


def cell(value: Any) -> str:
    """One value as one line of plain text."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, str):
        return printable(value).replace("\n", "\\n").replace("\t", "\\t")
    return printable(to_json(value))


def to_json(value: Any) -> str:
    """One value as JSON on one line: bytes as text with escapes, instants as ISO 8601, NaN and infinities by name."""
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def json_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """One JSON object a row."""
    for row in rows:
        yield to_json(dict(zip(columns, row, strict=True)))


def csv_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """CSV with a header (RFC 4180); nested values as JSON."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for row in itertools.chain([columns], rows):
        writer.writerow([_csv_cell(value) for value in row])
        yield buffer.getvalue().removesuffix("\n")
        buffer.seek(0)
        buffer.truncate()


def _csv_cell(value: Any) -> Any:
    plain = _plain(value)
    return to_json(value) if isinstance(plain, dict | list) else plain


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]], width: int | None = None) -> Iterator[str]:
    """An aligned table: numbers to the right. With `width` (of the terminal), long cells are cut with `…`."""
    rows = iter(rows)
    head = list(itertools.islice(rows, SAMPLE))
    texts = [[cell(value) for value in row] for row in head]
    right = [
        any(row[k] is not None for row in head)
        and all(row[k] is None or (isinstance(row[k], int | float) and not isinstance(row[k], bool)) for row in head)
        for k in range(len(columns))
    ]
    widths = [max([len(name), *(len(row[k]) for row in texts)]) for k, name in enumerate(columns)]
    if width:
        widths = _fit(widths, width - 2 * (len(columns) - 1))

    def line(cells: Iterable[str]) -> str:
        return "  ".join(
            _cut(text, size if width else None).rjust(size)
            if is_right
            else _cut(text, size if width else None).ljust(size)
            for text, size, is_right in zip(cells, widths, right, strict=True)
        ).rstrip()

    yield line(columns)
    yield "  ".join("-" * size for size in widths)
    for row in itertools.chain(texts, ([cell(value) for value in row] for row in rows)):
        yield line(row)


def _fit(widths: list[int], room: int) -> list[int]:
    """Cut the widest columns to one common width so that all fit into `room`; no column below 8."""
    widths = list(widths)
    limit = max(widths, default=0)
    while sum(min(size, limit) for size in widths) > room and limit > 8:
        limit -= 1
    return [min(size, limit) for size in widths]


def _cut(text: str, size: int | None) -> str:
    return text if size is None or len(text) <= size else text[: size - 1] + "…"
