"""The process that reads files of indexes, by DuckDB: no text of anybody goes into SQL.

It is a process of its own since DuckDB may take all memory and time that there is: the system
bounds the former, and who started it ends it. What it finds goes out at once, a line of JSON each,
so that whoever ends it knows how far it came.

1. It looks for what is asked for: an id as `id` and as `root`, a place, or what rows have. Files of
   the newest hours come first, a few at a time.
2. What these rows name (their ids, roots and next ids) is looked for in all files, by `id` and by
   `root`, until nothing new is named. Each is a comparison with one value, for which DuckDB asks
   bloom filters; many values are looked for in one scan.
3. It says of how many ways the reporters tell, what they have dropped, and how new the files are.

| line | says |
|---|---|
| `row` | an event, once, with `index`: the place of its index among those asked |
| `chunk` | so many of the chunks have been searched for what is asked for |
| `more` | there are more ways, or more events, than were wanted |
| `unread` | a file, and why it was not read |
| `gone` | a file was merged meanwhile: list again |
| `told` | of an index: `shares` by client where not all is traced, `dropped`, `newest_ms` |
| `end` | that all was looked at |
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb

MOST_EVENTS: Final = 20_000
MOST_IDS: Final = 1_000
"""Of one search; a way that goes on for longer is cut, and said to be."""
MEMORY_BYTES: Final = 512 << 20
_DUCKDB_BYTES: Final = 384 << 20
"""What DuckDB takes of that for rows; files' metadata and results are beside it."""
_FEW: Final = 16
"""Up to here values are looked for one by one."""
_ROWS_A_WAY: Final = 10
_ROUNDS: Final = 8
"""A look-up names what the next one looks for: an id its root, a root its retries."""

_ID: Final = re.compile(r"[0-9a-f]{32}")
_FROM: Final = (
    "FROM (FROM no_events UNION ALL BY NAME FROM read_parquet("
    "$files, filename = true, hive_partitioning = false, union_by_name = true))"
)
"""A column that a file lacks is null there, also if all files lack it: `no_events` has it."""
_CONDITIONS: Final = {
    "key": '"key" = $key',
    "tag": "(tags = $tag OR list_has_any(string_split(tags, ','), "
    r"[$tag, '\c' || $tag, '\t' || $tag, '\c\t' || $tag]))",
    "status": "status IN ($status, upper($status), lower($status))",
    "group": '"group" = $group',
    "topic": "topic = $topic",
    "from_ms": "time_ms >= $from_ms",
    "to_ms": "time_ms < $to_ms",
}
"""What rows may be asked for; all that is given applies to one row."""


class _GoneError(Exception):
    """A file is not there any more."""


class _FullError(Exception):
    """There are more events than anybody wants to see."""


class Lookups:
    """One search.

    Args:
        request: `chunks`, lists of paths with the place of their index; `arrived_ms`, of each index
            by when all of it had arrived; the `columns` of events with their types, and those of
            their `identity`; `id`, `place` or `having`, which is what rows have; `limit`, of ways.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request: Final = request
        self._chunks: Final[list[tuple[int, list[str]]]] = [
            (index, paths) for index, paths in request["chunks"]
        ]
        self._index_of: Final = {path: index for index, paths in self._chunks for path in paths}
        self._columns: Final[Mapping[str, str]] = request["columns"]
        self._seen: set[tuple[Any, ...]] = set()
        self._ids: dict[str, bool] = {}
        self._roots: dict[str, bool] = {}
        """What is named, and whether it was looked for."""
        self._is_sent = False
        """Whether a program has told that it sent the message that is asked for."""
        self._unread: set[str] = set()
        self._duckdb: Final = duckdb.connect(
            config={
                "memory_limit": f"{_DUCKDB_BYTES >> 20}MiB",
                "temp_directory": "",
                "threads": 2,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            }
        )
        self._duckdb.execute("SET parquet_metadata_cache = true")
        columns = ", ".join(f'"{name}" {kind}' for name, kind in self._columns.items())
        self._duckdb.execute(f"CREATE TABLE no_events ({columns}, filename VARCHAR)")

    def run(self) -> None:
        """Searches, and says what it finds."""
        try:
            self._begin()
            self._follow()
            for index in sorted({index for index, _ in self._chunks}):
                _say("told", self._told(index))
        except _FullError:
            _say("more", 1)
        except _GoneError as gone:
            _say("gone", str(gone))
            return
        _say("end", 1)

    def _begin(self) -> None:
        """Looks for what is asked for."""
        asked = self._request
        for number, chunk in enumerate(self._chunks, start=1):
            if "having" in asked:
                if self._having(chunk, asked["having"]):
                    _say("more", 1)
                    return
            elif "place" in asked:
                topic, partition, offset = asked["place"]
                where = '"offset" = $offset AND "partition" = $partition AND topic = $topic'
                values = {"offset": offset, "partition": partition, "topic": topic}
                self._take(self._rows(chunk, where, values))
                self._one(chunk, "root", f"{topic}/{partition}/{offset}")
            else:
                self._one(chunk, "id", bytes.fromhex(asked["id"]))
                self._one(chunk, "root", asked["id"])
            _say("chunk", number)
        if "id" in asked:
            self._ids[asked["id"]] = self._roots[asked["id"]] = True
            if not self._is_sent and not any(self._roots.keys() - {asked["id"]}):
                # A retry of which nothing is told yet: only what was retried names it.
                for chunk in self._chunks:
                    self._one(chunk, "next_id", bytes.fromhex(asked["id"]))

    def _having(self, chunk: tuple[int, list[str]], having: Mapping[str, Any]) -> bool:
        """Notes ways of which a row has this, the latest first; True if there are too many."""
        where = " AND ".join(_CONDITIONS[name] for name in having)
        limit = int(self._request["limit"])
        sql = (
            f'SELECT id, root, topic, "partition", "offset" {_FROM} WHERE {where} '
            "ORDER BY time_ms DESC LIMIT $rows"
        )
        count = 0
        for row in self._run(sql, chunk, {**having, "rows": limit * _ROWS_A_WAY + 1}):
            id_, root, topic, partition, offset = row
            count += 1
            if root is None and id_ is None:
                root = f"{topic}/{partition}/{offset}"
            if root is not None and root not in self._roots:
                self._roots[root] = False
            if id_ is not None and id_.hex() not in self._ids:
                self._ids[id_.hex()] = False
            if len(self._roots.keys() | self._ids.keys()) >= limit:
                return True
        return count > limit * _ROWS_A_WAY

    def _follow(self) -> None:
        """Looks for all that is named, until nothing new is."""
        for _ in range(_ROUNDS):
            for root in [*self._roots]:
                if _ID.fullmatch(root):
                    self._ids.setdefault(root, False)
            for id_ in self._ids:
                self._roots.setdefault(id_, False)
            ids, roots = _new(self._ids), _new(self._roots)
            if not ids and not roots:
                return
            if len(self._ids) > MOST_IDS:
                raise _FullError
            for chunk in self._chunks:
                self._any(chunk, "id", [bytes.fromhex(id_) for id_ in ids])
                self._any(chunk, "root", roots)
        raise _FullError

    def _told(self, index: int) -> dict[str, Any]:
        """Returns what the reporters of an index tell of themselves."""
        shares: dict[str, float] = {}
        dropped: dict[tuple[str, int], int] = {}
        newest_ms = None
        for chunk in self._chunks:
            if chunk[0] != index:
                continue
            sql = f"SELECT client, min(share) {_FROM} WHERE share < 1 GROUP BY client LIMIT 100"
            for client, share in self._run(sql, chunk, {}):
                shares[client or ""] = min(share, shares.get(client or "", 1.0))
            sql = f"SELECT DISTINCT reporter, number, dropped {_FROM} WHERE dropped > 0 LIMIT 10000"
            for reporter, number, count in self._run(sql, chunk, {}):
                dropped[reporter, number] = count
            if newest_ms is None:  # the first chunk has what arrived last
                # What says that it is later than it arrived is told by a clock that is ahead.
                sql = f"SELECT max(time_ms) {_FROM} WHERE kind <> 'accepted' AND time_ms < $until"
                until = {"until": self._request["arrived_ms"][index]}
                newest_ms = max((t for (t,) in self._run(sql, chunk, until) if t), default=None)
        told = {"shares": shares, "dropped": sum(dropped.values()), "newest_ms": newest_ms}
        return {"index": index, **told}

    def _any(self, chunk: tuple[int, list[str]], column: str, values: Sequence[Any]) -> None:
        if len(values) <= _FEW:
            for value in values:
                self._one(chunk, column, value)
            return
        where = f'list_contains($values, "{column}")'  # an IN reads all columns of all rows
        self._take(self._rows(chunk, where, {"values": values}))

    def _one(self, chunk: tuple[int, list[str]], column: str, value: Any) -> None:
        self._take(self._rows(chunk, f'"{column}" = $value', {"value": value}))

    def _rows(
        self, chunk: tuple[int, list[str]], where: str, values: Mapping[str, Any]
    ) -> Iterator[tuple[Any, ...]]:
        columns = ", ".join(f'"{name}"' for name in self._columns)
        sql = f"SELECT {columns}, filename {_FROM} WHERE {where} LIMIT {MOST_EVENTS}"
        return self._run(sql, chunk, values)

    def _take(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Says events that are new, and notes what they name."""
        for *values, path in rows:
            event = dict(zip(self._columns, values, strict=True))
            index = self._index_of[path]
            identity = (index, *(event[name] for name in self._request["identity"]))
            if identity in self._seen:
                continue
            if len(self._seen) >= MOST_EVENTS:
                raise _FullError
            self._seen.add(identity)
            self._is_sent |= event["kind"] == "sent"
            for name in ("id", "next_id"):
                if event[name] is not None:
                    event[name] = event[name].hex()
                    self._ids.setdefault(event[name], False)
            if event["root"] is not None:
                self._roots.setdefault(event["root"], False)
            known = {name: value for name, value in event.items() if value is not None}
            _say("row", {"index": index, **known})

    def _run(
        self, sql: str, chunk: tuple[int, list[str]], values: Mapping[str, Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Yields the rows of a chunk; a file that cannot be read is found by halves, and named."""
        index, paths = chunk
        paths = [path for path in paths if path not in self._unread]
        if not paths:
            return
        try:
            found = self._duckdb.execute(sql, {"files": [*map(_escaped, paths)], **values})
            yield from found.fetchall()
        except duckdb.Error as error:
            for path in paths:
                if not Path(path).exists():
                    raise _GoneError(path) from error
            if len(paths) == 1:
                self._unread.add(paths[0])
                _say("unread", [index, paths[0], str(error).splitlines()[0]])
                return
            half = len(paths) // 2
            yield from self._run(sql, (index, paths[:half]), values)
            yield from self._run(sql, (index, paths[half:]), values)


def _escaped(path: str) -> str:
    """Returns a path in which DuckDB sees no pattern."""
    return re.sub(r"([*?\[])", r"[\1]", path)


def _new(named: dict[str, bool]) -> list[str]:
    """Returns what was not looked for yet; from now on it counts as looked for."""
    new = [name for name, looked in named.items() if not looked]
    named.update(dict.fromkeys(new, True))
    return new


def _say(what: str, value: Any) -> None:
    sys.stdout.write(json.dumps({what: value}) + "\n")
    if what != "row":
        sys.stdout.flush()


def main() -> None:
    """Does what standard input asks for."""
    request = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    Lookups(request).run()


if __name__ == "__main__":
    main()
