"""Batches: events of one kind and one reporter, as a record of JSON; docs/TRACE.md has the format.

An event's identity is its reporter, the number of its batch, and its row: a batch that Kafka has
twice is known by that. A reader takes any batch whose columns have one length, whatever its version
is, and whatever else it has; what it cannot take is one error, `BatchInvalidError`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from delaywheel.trace.schema import COLUMNS, VERSION, Form

Rows = Mapping[str, Sequence[Any]]
"""Columns of equal length by their names; ids are 16 bytes, and names are text, or None."""


class BatchInvalidError(ValueError):
    """A record of the trace topic is not one that was written as a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHead:
    """What the events of a batch have in common; docs/TRACE.md has the fields, `rest` others."""

    kind: str
    cluster: str
    reporter: str
    number: int
    client: str | None
    host: str
    ip: str | None
    release: str
    share: float
    dropped: int
    version: int = VERSION
    rest: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Returns the head of a batch; raises BatchInvalidError if it is not whole."""
        wanted = {**document, "version": document.get("v")}
        found: dict[str, Any] = {}
        for name, fits in _HEAD.items():
            value = found[name] = wanted.get(name)
            if not fits(value):
                raise BatchInvalidError(f"{'v' if name == 'version' else name} is {value!r}")
        rest = {name: value for name, value in document.items() if name not in _OF_THE_FORMAT}
        return cls(**found, rest=rest)


def encode(head: BatchHead, rows: Rows) -> bytes:
    """Encodes a batch of at least one event."""
    names: dict[str | None, int] = {}
    columns = [f'"{name}":[{_written(COLUMNS[name].form, rows[name], names)}]' for name in rows]
    said = asdict(head)
    known = {"v": said.pop("version"), **said.pop("rest"), **said}
    before = _dumps({**known, "names": list(names)})
    return f'{before[:-1]},"rows":{{{",".join(columns)}}}}}'.encode(errors="replace")


def _written(form: Form, values: Sequence[Any], names: dict[str | None, int]) -> str:
    """Returns a column as it is written between brackets; its names are added to the others.

    Most columns of a batch have one value, and most ids are there: what costs is to look at each.
    """
    first = values[0]
    if values.count(first) == len(values):
        if form is Form.NAME and first is not None:
            first = names.setdefault(first, len(names))
        elif form is Form.ID and first is not None:
            first = first.hex()
        return ",".join([_dumps(first)] * len(values))
    if form is Form.NAME:
        for name in dict.fromkeys(values):
            if name is not None:
                names.setdefault(name, len(names))
        values = list(map(names.get, values))
    elif form is Form.ID:
        if None not in values:
            return '"' + '","'.join(map(bytes.hex, values)) + '"'
        values = [None if id_ is None else id_.hex() for id_ in values]
    return _dumps(values)[1:-1]


_dumps: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def decode(record: bytes) -> tuple[BatchHead, dict[str, list[Any]]]:
    """Decodes a batch; columns of unknown names are as they were written.

    Raises BatchInvalidError, which says what is wrong first.
    """
    try:
        document = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise BatchInvalidError(f"no JSON: {error}") from error
    if not isinstance(document, dict):
        raise BatchInvalidError("no JSON object")
    head = BatchHead.of(document)
    names, rows = document.get("names"), document.get("rows")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BatchInvalidError("names is no list of texts")
    if not isinstance(rows, dict) or not all(isinstance(column, list) for column in rows.values()):
        raise BatchInvalidError("rows has not one list a column")
    if len({len(column) for column in rows.values()}) != 1 or not next(iter(rows.values())):
        raise BatchInvalidError("the columns have not one length, or none has a row")
    return head, {name: _read(name, column, names) for name, column in rows.items()}


def _read(name: str, column: list[Any], names: list[str]) -> list[Any]:
    known = COLUMNS.get(name)
    if known is None:
        return column
    fits = _FITS[known.form]
    for value in column:
        if value is not None and not fits(value):
            raise BatchInvalidError(f"in column {name} there is {value!r}")
    match known.form:
        case Form.NAME:
            if any(number is not None and number >= len(names) for number in column):
                raise BatchInvalidError(f"column {name} names what is not in names")
            return [None if number is None else names[number] for number in column]
        case Form.ID:
            return [None if id_ is None else bytes.fromhex(id_) for id_ in column]
        case _:
            return column


_HEX: Final = re.compile(r"[0-9a-f]{32}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_hex(value: Any) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


_FITS: Final[dict[Form, Callable[[Any], bool]]] = {
    Form.ID: _is_hex,
    Form.NAME: _is_count,
    Form.NUMBER: _is_number,
    Form.TEXT: _is_text,
}
_HEAD: Final[dict[str, Callable[[Any], bool]]] = {
    "version": lambda value: _is_count(value) and value >= VERSION,
    "kind": _is_text,
    "cluster": _is_text,
    "reporter": _is_hex,
    "number": _is_count,
    "client": _is_text_or_none,
    "host": _is_text,
    "ip": _is_text_or_none,
    "release": _is_text,
    "share": lambda value: type(value) in (int, float) and 0 <= value <= 1,
    "dropped": _is_count,
}
_OF_THE_FORMAT: Final = {*_HEAD, "v", "names", "rows"}
