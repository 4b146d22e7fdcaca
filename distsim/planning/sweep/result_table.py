"""A table that is saved row by row, so that an interrupted run can continue: CSV, or Parquet that
is made from the CSV at the end.

Each row is one line, written at once. A line that a crash cut off is dropped when the table is
continued. At the end, the file is replaced by one with the rows in the order of the points.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distsim.common.errors import UsageError
from distsim.common.file_io import escape_control_characters, read_bytes, write_file
from distsim.common.file_lock import FileLock
from distsim.planning.sweep.worker_pool import import_optional

#: The column that identifies a row: the content hash of a point.
KEY_COLUMN = "key"


class ResultTable:
    """Rows by their key; all cells are texts. ``path`` None: kept in memory only. Raises
    UsageError for a file of another table, and for a file that another sweep is writing.

    The file is locked until `finish` or `release`: two sweeps that replace it would lose each
    other's rows.
    """

    def __init__(self, path: Path | None, columns: Sequence[str]) -> None:
        self.path, self.columns = path, (KEY_COLUMN, *columns)
        self.rows: dict[str, dict[str, str]] = {}
        self.file: Any = None
        self._lock: FileLock | None = None
        if path is None:
            return
        if path.suffix not in (".csv", ".parquet"):
            raise UsageError(
                f"{path}: unknown file type for a table", "use a name that ends in .csv or .parquet"
            )
        if not path.parent.is_dir():
            raise UsageError(
                f"the folder {path.parent} does not exist",
                "name a file in a folder that exists",
            )
        if path.suffix == ".parquet":
            import_optional("pyarrow")
        self.growing = path if path.suffix == ".csv" else path.with_name(path.name + ".part.csv")
        self._lock = FileLock(self.growing)
        try:
            self._take_up()
        except BaseException:
            self.release()
            raise

    # --- existing rows ---
    def _take_up(self) -> None:
        if self.path is not None and self.path.suffix == ".parquet" and self.path.exists():
            self._keep(_parquet_rows(self.path), self.path)
        if self.growing.exists() and self.growing.stat().st_size:
            text = read_bytes(self.growing).decode("utf-8", "replace")
            whole = text[: text.rfind("\n") + 1]
            self._keep(list(csv.reader(io.StringIO(whole))), self.growing)
        self._write(self.growing, self.rows.values())  # without what was cut off
        self.file = self.growing.open("a", encoding="utf-8", newline="")

    def _keep(self, lines: list[list[str]], path: Path) -> None:
        if not lines or tuple(lines[0]) != self.columns:
            remedy = "name another file, or remove it"
            raise UsageError(
                f"{path} contains another table: its columns differ from those of this sweep",
                remedy,
            )
        for line in lines[1:]:
            if len(line) == len(self.columns):
                row = dict(zip(self.columns, line, strict=True))
                self.rows[row[KEY_COLUMN]] = row

    # --- rows ---
    def add(self, key: str, row: Mapping[str, object]) -> None:
        """A new row, on its way to the disk when this returns."""
        cells = {KEY_COLUMN: key, **{name: cell_text(row.get(name)) for name in self.columns[1:]}}
        self.rows[key] = cells
        if self.file is not None:
            self.file.write(_csv_line(cells[name] for name in self.columns))
            self.file.flush()

    def finish(self, order: Sequence[tuple[str, Mapping[str, str]]]) -> list[dict[str, str]]:
        """Write the table: a row for each key and what its point calls itself; rows of other points
        stay, behind them. Returns the rows of the points. Raises as `write_file`."""
        ours = [{**self.rows[key], **own} for key, own in order]
        named = {key for key, _ in order}
        whole = [*ours, *(row for key, row in self.rows.items() if key not in named)]
        try:
            self._close()
            if self.path is not None and self.path.suffix == ".csv":
                self._write(self.path, whole)
            elif self.path is not None:
                write_file(self.path, _parquet_bytes(self.columns, whole))
                self.growing.unlink(missing_ok=True)
        finally:
            self.release()
        return ours

    def release(self) -> None:
        """Close the file and give up the lock; the rows so far stay on the disk."""
        self._close()
        if self._lock is not None:
            self._lock.release()

    def _close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def _write(self, path: Path, rows: Iterable[Mapping[str, str]]) -> None:
        lines = [
            _csv_line(self.columns),
            *(_csv_line(row[name] for name in self.columns) for row in rows),
        ]
        write_file(path, lines)


def cell_text(value: object) -> str:
    """A value as a cell: nothing as an empty one, a text on one line, a float with all its
    digits.
    """
    if value is None:
        return ""
    return escape_control_characters(
        " ".join(value.split()) if isinstance(value, str) else str(value), one_line=True
    )


def _csv_line(cells: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(list(cells))
    return out.getvalue()


def _parquet_bytes(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> bytes:
    """Columns of integers and of floats as such, the others as texts; empty cells are null."""
    arrow, parquet = import_optional("pyarrow"), import_optional("pyarrow.parquet")
    kept = list(rows)
    found = {name: arrow.array(_typed_column([row[name] for row in kept])) for name in columns}
    out = io.BytesIO()
    parquet.write_table(arrow.table(found), out)
    return out.getvalue()


def _typed_column(cells: Sequence[str]) -> list[Any]:
    for kind in (int, float):
        try:
            made = [None if text == "" else kind(text) for text in cells]
        except ValueError:
            continue
        return made if [cell_text(value) for value in made] == list(cells) else list(cells)
    return list(cells)


def _parquet_rows(path: Path) -> list[list[str]]:
    parquet = import_optional("pyarrow.parquet")
    try:
        data = parquet.read_table(path).to_pydict()
    except Exception as error:  # pyarrow's own kinds
        raise UsageError(
            f"{path} is not a Parquet file: {error}", "name another file, or remove it"
        ) from None
    return [
        list(data),
        *([cell_text(value) for value in line] for line in zip(*data.values(), strict=True)),
    ]


__all__ = ["KEY_COLUMN", "ResultTable", "cell_text"]
