"""Marks: which letters were dealt with. They ensure that a letter is replayed only once.

Beside a dead-letter topic lies `<topic>-marks`, compacted, with one partition. It is written only
in transactions of the id `<topic>-replay`:

| key | value (JSON) |
|---|---|
| `claim` | the owner of the transactions that follow: a token never used before, and when |
| `<topic id>/<partition>/<offset>` | some letters that were dealt with together: how (`action`), when (`at_ms`), where they went (`to`), and their offsets as ranges |
| `position/<topic id>/<partition>` | the next offset for the handlers of letters (`handling/`); written with what they decided |

The offset in a key is the first of the ranges; the topic id separates a topic that was deleted and
recreated under the same name. A claim removes the marks of letters that retention has deleted.

A process that replays or drops:

1. inits the transactional id, which ends what an earlier one had begun, and fences it;
2. commits a claim;
3. reads the marks from their beginning up to its own claim;
4. goes through the letters, and sends the selected ones without marks, with their marks in the
   same transaction, some hundreds in each.

Invariants:

1. A letter was sent again exactly if a mark of it is committed: both are in one transaction.
2. A process sends a letter only after it has read every mark ever committed for it. It has read
   the marks before its own claim in step 3, up to the claim, so none is missed that is not visible
   yet. After its claim only a later claimant can commit marks, and that one's init has fenced this
   process. It knows its own marks.
3. A letter has one mark. So a process killed at any step leaves each letter either sent and marked
   or neither; repeating the command deals with the rest.
4. After a commit whose outcome is unknown nothing more is sent: a late copy of it could end the
   next transaction in the middle. The next process reads what was committed.

A set of letters is a bit each, so that a topic of a hundred million takes 25 MB.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from delaywheel.deadletters.letter import LetterPlace

CLAIM_KEY = b"claim"
_POSITION = b"position/"
MARKS_SUFFIX = "-marks"

_CHUNK_BITS = 1 << 16
_MOST_LETTERS = 100_000
"""The longest mark to read; those written here have some hundred letters."""


class LetterState(StrEnum):
    """What became of a letter."""

    WAITING = "waiting"
    """It still waits."""
    REPLAYED = "replayed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Mark:
    """Some letters of one partition that were dealt with together.

    `to` is the topic that they were all sent to, if it was not their own; `ranges` are the first
    and last offset of each run, ascending.
    """

    state: LetterState
    at_ms: int
    to: str | None
    ranges: tuple[tuple[int, int], ...]

    def covers(self, offset: int) -> bool:
        """Returns whether the mark includes a letter."""
        return any(first <= offset <= last for first, last in self.ranges)


def make_marks(
    topic_id: str, places: Iterable[LetterPlace], state: LetterState, *, at_ms: int, to: str | None
) -> list[tuple[bytes, bytes]]:
    """Returns the records, keys and values, that mark letters."""
    offsets: dict[int, list[int]] = {}
    for place in sorted(places):
        offsets.setdefault(place.partition, []).append(place.offset)
    records = []
    for partition, chosen in offsets.items():
        ranges = _ranges(chosen)
        value = {"action": state.value, "at_ms": at_ms, "to": to, "offsets": ranges}
        key = f"{topic_id}/{partition}/{chosen[0]}".encode()
        records.append((key, json.dumps(value, separators=(",", ":")).encode()))
    return records


def make_positions(topic_id: str, positions: Mapping[int, int]) -> list[tuple[bytes, bytes]]:
    """Returns the records, keys and values, that say how far each partition was handled."""
    return [
        (b"%s%s/%d" % (_POSITION, topic_id.encode(), partition), b"%d" % offset)
        for partition, offset in positions.items()
    ]


class Marks:
    """All letters of one topic that are marked, as far as marks were read."""

    def __init__(self, topic_id: str, ends_of_deleted: Mapping[int, int]) -> None:
        """Starts without marks; `ends_of_deleted` are partitions' present first offsets."""
        self.topic_id = topic_id
        self._firsts = ends_of_deleted
        self._sets: dict[tuple[int, LetterState], _Offsets] = {}
        self.positions: dict[int, int] = {}
        """The next letter of each partition for handlers of letters; they keep this here."""
        self.changed_ms = 0
        """When anything was last written among the marks, in Unix milliseconds."""
        self.obsolete: list[bytes] = []
        """Keys of marks about letters that no longer exist."""
        self.foreign = 0
        """How many records are no marks: another program wrote them, and they count for nothing."""

    def read(self, key: bytes | str | None, value: bytes | None) -> tuple[int, Mark] | None:
        """Adds a record; returns its partition and mark if it concerns existing letters."""
        if not isinstance(key, bytes):
            self.foreign += 1
            return None
        if key == CLAIM_KEY or value is None:
            return None
        if key.startswith(_POSITION):
            self._read_position(key, value)
            return None
        try:
            topic_id, partition, _ = key.decode().rsplit("/", 2)  # an id may contain some too
            number, mark = int(partition), _parse(json.loads(value))
        except (ValueError, KeyError, TypeError, IndexError):
            self.foreign += 1
            return None
        # A broker may not know of a new partition yet; a topic never loses one.
        first_left = self._firsts.get(number, 0)
        if topic_id != self.topic_id or mark.ranges[-1][1] < first_left:
            self.obsolete.append(key)
            return None
        self.add(number, mark.state, mark.ranges)
        return number, mark

    def _read_position(self, key: bytes, value: bytes) -> None:
        topic_id, _, partition = key[len(_POSITION) :].rpartition(b"/")
        if not partition.isdigit() or not value.isdigit():
            self.foreign += 1
        elif topic_id.decode(errors="replace") != self.topic_id:
            self.obsolete.append(key)
        else:
            self.positions[int(partition)] = int(value)

    def add(self, partition: int, state: LetterState, ranges: Iterable[tuple[int, int]]) -> None:
        """Marks letters."""
        marked = self._sets.setdefault((partition, state), _Offsets())
        for first, last in ranges:
            marked.add(max(first, self._firsts.get(partition, 0)), last)

    def state_of(self, place: LetterPlace) -> LetterState:
        """Returns what became of a letter."""
        for state in (LetterState.REPLAYED, LetterState.DROPPED):
            marked = self._sets.get((place.partition, state))
            if marked is not None and place.offset in marked:
                return state
        return LetterState.WAITING


class _Offsets:
    """A set of offsets, one bit each."""

    def __init__(self) -> None:
        self._chunks: dict[int, bytearray] = {}

    def add(self, first: int, last: int) -> None:
        for offset in range(first, last + 1):
            number, bit = divmod(offset, _CHUNK_BITS)
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunks[number] = bytearray(_CHUNK_BITS // 8)
            chunk[bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, offset: int) -> bool:
        number, bit = divmod(offset, _CHUNK_BITS)
        chunk = self._chunks.get(number)
        return chunk is not None and bool(chunk[bit >> 3] & 1 << (bit & 7))


def _parse(document: Any) -> Mark:
    ranges = tuple((int(first), int(last)) for first, last in document["offsets"])
    letters = sum(max(0, last - first + 1) for first, last in ranges)
    if not 0 < letters <= _MOST_LETTERS:
        raise ValueError(f"a mark of {letters} letters")
    return Mark(LetterState(document["action"]), int(document["at_ms"]), document["to"], ranges)


def _ranges(offsets: list[int]) -> list[tuple[int, int]]:
    """Returns ascending offsets as runs."""
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and offset == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], offset)
        else:
            runs.append((offset, offset))
    return runs
