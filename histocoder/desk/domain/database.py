"""The database of a desk: SQLite, with the queries of `queries.sql` by their names."""

import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from histocoder.text.normalize import description_keys

_TABLES = Path(__file__).with_name("tables.sql")
_QUERIES = Path(__file__).with_name("queries.sql")
_NEW_COLUMNS = {  # table -> columns that 1.0.0 had not
    "sources": {"file": "TEXT", "sample": "INTEGER DEFAULT 0"},
    "cards": {"key": "TEXT"},
}
_AND = " & "  # between the names of two deciders, as they were written before they were a list


class Database:
    """A database on disk, for several threads; it is brought to the present form when opened."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.RLock()
        self._queries = _named_queries(_QUERIES.read_text(encoding="utf-8"))
        self._connection = sqlite3.connect(path, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row

        # functions of SQLite's own know letters of ASCII alone
        self._connection.create_function("casefold", 1, str.casefold)
        self._connection.create_function("card_key", 2, _card_key)
        self._connection.create_function("has_same_codes", 2, _has_same_codes)

        # a decision is on the disk when its transaction ends, and what is deleted is overwritten
        self._connection.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA secure_delete = ON;"
        )

        # databases of earlier versions first become like new ones
        self._add_columns()
        self._list_deciders()
        self._connection.executescript(_TABLES.read_text(encoding="utf-8"))

    def close(self) -> None:
        with self.lock:
            self._connection.close()

    def rows(self, query: str, **values: object) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        with self.lock:
            return self._connection.execute(self._queries[query], values).fetchall()

    def count(self, query: str, **values: object) -> int:
        """Return the number of rows of a query that has a limit and an offset, without these."""
        sql = f"SELECT count(*) AS num_rows FROM ({self._queries[query]})"
        with self.lock:
            row = self._connection.execute(sql, {**values, "limit": -1, "offset": 0}).fetchone()
        return row["num_rows"]

    def change(self, query: str, **values: object) -> int:
        """Change rows, within a transaction; return the id of a row that is added."""
        return self._connection.execute(self._queries[query], values).lastrowid or 0

    def change_many(self, query: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Change rows as `change` does, once with the values of each row."""
        self._connection.executemany(self._queries[query], rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other threads away in a block; what it changes is on disk at its end, or nothing of
        it.
        """
        with self.lock, self._connection:
            yield

    def forget_deleted(self) -> None:
        """Leave nothing of deleted rows in the files: they stand in free pages, and in the
        write-ahead log, until both are rewritten.
        """
        with self.lock:
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _columns(self, table: str) -> list[str]:
        return [row["name"] for row in self._connection.execute(f"PRAGMA table_info({table})")]

    def _add_columns(self) -> None:
        """Give the tables of a desk of 1.0.0 the columns that it lacks."""
        for table, new_columns in _NEW_COLUMNS.items():
            names = self._columns(table)
            for name, kind in new_columns.items():
                if names and name not in names:
                    self._connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")

    def _list_deciders(self) -> None:
        """Make a list of who decided on a card, which was a text of joined names."""
        if "who" not in self._columns("cards"):
            return
        with self._connection as connection:
            connection.execute("BEGIN")
            connection.execute("ALTER TABLE cards RENAME COLUMN who TO deciders")
            cards = connection.execute("SELECT id, deciders FROM cards WHERE deciders NOT NULL")
            rows = [(json.dumps(joined.split(_AND)), card) for card, joined in cards]
            connection.executemany("UPDATE cards SET deciders = ? WHERE id = ?", rows)


def _named_queries(text: str) -> dict[str, str]:
    """Return the queries of a file in which `-- name: NAME` stands before each, and notes behind
    the name.
    """
    parts = re.split(r"^-- name: (\w+).*$", text, flags=re.MULTILINE)
    queries = [query.strip().removesuffix(";") for query in parts[2::2]]
    return dict(zip(parts[1::2], queries, strict=True))


def _card_key(text: str, lang: str) -> str:
    """Return what cards have in common whose descriptions and languages are the same."""
    return f"{lang} {description_keys([text])[0]}"


def _has_same_codes(codes: str, predicted: str) -> bool:
    return set(json.loads(codes)) == set(json.loads(predicted))
