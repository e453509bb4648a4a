"""Metrics as SQL: each NAME.sql beside this file is one question, asked with DuckDB of shards or of tables in memory.

A metric's query yields rows of (slice, figure, figure, ...), the slice `all` first. It reads the views of views.sql:
trajectories, turns, tokens, tests, updates, metrics. lego-train's gate and `lego-inspect align` run the same file.

    run("align", updates=table) # [("align/tokens", 812.0), ("align/pearson", 0.9999), ..., ("align/lag=0/k3", ...)]
    columns, rows = query(connect(trajectories=table), "behaviour")

A figure that cannot be computed (a correlation of one token, a mean of nothing) is null in the rows and absent from
`run`: it is never 0.
"""

import math
from pathlib import Path
from typing import Any

from legorl import schema

FOLDER = Path(__file__).parent
VIEWS = ("trajectories", "turns", "tokens", "tests", "updates", "metrics")
ALL = "all"


def names() -> list[str]:
    """The metrics there are."""
    return sorted(file.stem for file in FOLDER.glob("*.sql") if file.stem != "views")


def connect(trajectories: Any = None, updates: Any = None, metrics: Any = None) -> Any:
    """Return a DuckDB connection with the views over the given rows, and with no way to any file.

    Each argument is a pyarrow Table or Dataset with schema.TRAJECTORY, UPDATE or METRIC; None stands for no rows.
    """
    import duckdb

    connection = duckdb.connect()
    given = {
        "trajectory_rows": (trajectories, schema.TRAJECTORY),
        "update_rows": (updates, schema.UPDATE),
        "metric_rows": (metrics, schema.METRIC),
    }
    for name, (rows, arrow_schema) in given.items():
        connection.register(name, arrow_schema.empty_table() if rows is None else rows)
    connection.execute((FOLDER / "views.sql").read_text())
    connection.execute(
        "set timezone = 'UTC'; set python_enable_replacements = false; set enable_external_access = false"
    )
    connection.execute("set lock_configuration = true")
    return connection


def query(connection: Any, name: str) -> tuple[list[str], list[tuple]]:
    """Run the metric `name` on a connection of `connect`; return (column names, rows), NaN as None.

    Raises ValueError for a name that is no metric.
    """
    if name not in names():
        raise ValueError(f"no metric {name!r}; there are: {', '.join(names())}")
    result = connection.execute((FOLDER / f"{name}.sql").read_text())
    columns = [column[0] for column in result.description]
    return columns, [tuple(_measured(value) for value in row) for row in result.fetchall()]


def run(name: str, trajectories: Any = None, updates: Any = None, turns: Any = None) -> list[tuple[str, float]]:
    """Run the metric `name` over tables in memory; return its figures over all, then those of each slice.

    Each is (NAME/FIGURE, value) or (NAME/SLICE/FIGURE, value), as metrics.parquet stores them.
    `trajectories` and `updates` as for `connect`. `turns` replaces the view of that name, for a caller that has no
    trajectory rows at hand: a pyarrow Table with attempt_id, turn, cause and harness is enough for `align`.
    """
    connection = connect(trajectories, updates)
    if turns is not None:
        connection.execute("drop view turns")
        connection.register("turns", turns)
    columns, rows = query(connection, name)
    connection.close()
    return [
        (f"{name}/{figure}" if row[0] == ALL else f"{name}/{row[0]}/{figure}", float(value))
        for row in rows
        for figure, value in zip(columns[1:], row[1:], strict=True)
        if value is not None
    ]


def _measured(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
