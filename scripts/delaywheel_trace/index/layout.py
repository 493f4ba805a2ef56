"""The names of an index's files, and what they prove; docs/TRACE.md has them for other readers.

    <hour>/b-<query>-<batch>.parquet                           a batch of the job
    <hour>/c-<span>[+<span>…]-<part>-<parts>-<from>-<to>.parquet    batches that were merged
    <hour>/a-<wheel>-<first seq>-<last seq>.parquet            rows of the ledger, as `accepted`
    bad/<hour>-<query>-<batch>-<records>.jsonl                 records that could not be read
    gaps/<from ms>-<to ms>-<query>.json                        what was never read

An hour is `2030-03-17T16`, UTC: of `b` and `c` the hour in which the batch was planned, which the
checkpoint keeps; of `a` the one in which the ledger says that its rows were accepted. A query is
twelve digits of the checkpoint's own id; a span is `<query>.<first batch>.<last batch>`. The parts
of a merge, numbered from 1, are one set; `from` and `to` are the seconds of the earliest and the
latest `time_ms` in the part.

Only one process writes, and it does these things alone:

1. A file appears whole, by a rename, and its content follows from its name: repeated after a crash
   it is the same. A batch comes back only until the checkpoint has it, and then no earlier one.
2. A set is merged from files of its hour that count. Its spans name all batches that were in them,
   and no other of its hour that is there, or may still come: of a query all batches before one
   that is there are decided.
3. Rows of the ledger are taken once: files `a` of one wheel have no seq in common.
4. What does not count is deleted, but not before a while has passed. Whole hours are, too, the
   oldest first.

So a reader takes as counting: each `a`; each set whose parts are all there, and which no other such
set covers; each batch that no such set of its hour covers. That is right at every moment: a set
counts from its last part on, at which its inputs cease to. A listing may be older than the folder:
a file that is not there any more means that it is to be listed again.

Rows may come twice all the same: Kafka has a record twice, or the checkpoint was lost, and another
query begins at the topics' beginning. Reporter, number and row are a row's identity; merging drops
what it sees twice, and a reader does again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Final, Self, TypeAlias

HOUR_MS: Final = 3_600_000
MOST_SPANS: Final = 6
"""In one name: file systems take 255 bytes."""
CLOCKS_DIFFER_MS: Final = HOUR_MS
"""How much later than its time by the sender's clock an event may arrive, as far as `b` and `a` go:
only names of `c` know the times of their rows."""

QUERY_DIGITS: Final = 12
_LATEST_S: Final = 9_999_999_999


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Batches of one query, from the first to the last."""

    query: str
    first: int
    last: int

    def covers(self, other: Span) -> bool:
        """Whether it has all batches of another one."""
        return self.query == other.query and self.first <= other.first and other.last <= self.last

    def __str__(self) -> str:
        return f"{self.query}.{self.first}.{self.last}"


@dataclass(frozen=True, slots=True, order=True)
class BatchFile:
    """Events as they came, of one batch."""

    hour_ms: int
    query: str
    batch: int

    @property
    def spans(self) -> tuple[Span, ...]:
        """Of it alone."""
        return (Span(self.query, self.batch, self.batch),)

    @property
    def path(self) -> str:
        """Below the index's folder."""
        return f"{hour_name(self.hour_ms)}/b-{self.query}-{self.batch}.parquet"


@dataclass(frozen=True, slots=True, order=True)
class MergedFile:
    """A part of a set: events of several batches, sorted by id and time.

    Attributes:
        from_s: The second of its earliest event.
        to_s: Of its latest.
    """

    hour_ms: int
    spans: tuple[Span, ...]
    part: int
    parts: int
    from_s: int
    to_s: int

    @property
    def path(self) -> str:
        """Below the index's folder."""
        return (
            f"{hour_name(self.hour_ms)}/c-{'+'.join(map(str, self.spans))}-{self.part:04}-"
            f"{self.parts:04}-{self.from_s:010}-{self.to_s:010}.parquet"
        )


@dataclass(frozen=True, slots=True, order=True)
class AcceptedFile:
    """Rows of the ledger of one wheel, accepted in one hour, sorted by id."""

    hour_ms: int
    wheel: str
    first_seq: int
    last_seq: int

    @property
    def path(self) -> str:
        """Below the index's folder."""
        seqs = f"{self.first_seq:019}-{self.last_seq:019}"
        return f"{hour_name(self.hour_ms)}/a-{self.wheel}-{seqs}.parquet"


@dataclass(frozen=True, slots=True, order=True)
class BadFile:
    """Records of one batch that were not read, a line of JSON each: place, reason, beginning."""

    hour_ms: int
    query: str
    batch: int
    records: int

    @property
    def path(self) -> str:
        """Below the index's folder."""
        return f"bad/{hour_name(self.hour_ms)}-{self.query}-{self.batch}-{self.records}.jsonl"


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """Records that arrived in Kafka between two times and are in no file.

    Attributes:
        query: That had read what was before; zeros: none.
    """

    from_ms: int
    to_ms: int
    query: str

    @property
    def path(self) -> str:
        """Below the index's folder."""
        return f"gaps/{self.from_ms:013}-{self.to_ms:013}-{self.query}.json"


EventFile: TypeAlias = BatchFile | MergedFile | AcceptedFile
IndexFile: TypeAlias = EventFile | BadFile | Gap


@dataclass(frozen=True, slots=True)
class Layout:
    """A listing of an index.

    Attributes:
        counting: What a reader takes, by hour; what is left of `broken` sets, too.
        stale: What counts no more: covered, or parts of a set that is not whole.
        bad: Records that were not read.
        gaps: What was never read.
        broken: Parts of sets of which somebody has taken others away: there is nothing else of
            their batches. They are neither merged nor deleted, so that the loss stays known.
    """

    counting: tuple[EventFile, ...]
    stale: tuple[EventFile, ...]
    bad: tuple[BadFile, ...]
    gaps: tuple[Gap, ...]
    broken: tuple[MergedFile, ...] = ()

    @classmethod
    def of(cls, paths: Iterable[str]) -> Self:
        """Sorts paths below the index's folder; what is none of ours is passed over."""
        files = [file for path in paths if (file := parse_path(path)) is not None]
        events = [f for f in files if isinstance(f, BatchFile | MergedFile | AcceptedFile)]
        counting: list[EventFile] = []
        broken: list[MergedFile] = []
        for _, of_hour in groupby(sorted(events, key=_hour_of), key=_hour_of):
            found = _counting(there := list(of_hour))
            counting += found
            broken += _broken(there, found)
        counting += broken
        known = set(counting)
        return cls(
            tuple(counting),
            tuple(file for file in events if file not in known),
            tuple(sorted(file for file in files if isinstance(file, BadFile))),
            tuple(sorted(file for file in files if isinstance(file, Gap))),
            tuple(broken),
        )

    def between(self, from_ms: int, to_ms: int) -> list[EventFile]:
        """Returns files that may have events with times from `from_ms` to before `to_ms`.

        What came late is in a later hour, and only `c` says of which times it is.
        """
        return [file for file in self.counting if _may_have(file, from_ms, to_ms)]

    def gaps_between(self, from_ms: int, to_ms: int) -> list[Gap]:
        """Returns gaps in which events from `from_ms` to before `to_ms` may be."""
        return [gap for gap in self.gaps if gap.to_ms >= from_ms and gap.from_ms < to_ms]

    def bad_between(self, from_ms: int, to_ms: int) -> int:
        """Returns how many records were not read that arrived in hours of this time."""
        return sum(
            bad.records
            for bad in self.bad
            if bad.hour_ms + HOUR_MS > from_ms and bad.hour_ms < to_ms
        )

    @property
    def begins_ms(self) -> int | None:
        """The hour in which its first event arrived; None: it has none."""
        arrived = (f.hour_ms for f in self.counting if not isinstance(f, AcceptedFile))
        return min(arrived, default=None)

    def ends_ms(self) -> Mapping[str, int]:
        """Returns the hour after the last one of each wheel's rows of the ledger."""
        ends: dict[str, int] = {}
        for file in self.counting:
            if isinstance(file, AcceptedFile):
                ends[file.wheel] = max(ends.get(file.wheel, 0), file.hour_ms + HOUR_MS)
        return ends

    def inputs(self, hour_ms: int) -> list[list[BatchFile | MergedFile]]:
        """Returns what counts of an hour and may be merged: batches and whole sets, in order."""
        found: dict[tuple[Span, ...], list[BatchFile | MergedFile]] = {}
        for file in self.counting:
            if file.hour_ms != hour_ms or isinstance(file, AcceptedFile) or file in self.broken:
                continue
            found.setdefault(file.spans, []).append(file)
        return [files for _, files in sorted(found.items())]


def spans_of(
    inputs: Iterable[BatchFile | MergedFile], others: Iterable[BatchFile | MergedFile] = ()
) -> tuple[Span, ...]:
    """Returns the spans of a merge: batches that are not there are within, others are not."""
    of_others = [span for file in others for span in file.spans]
    spans: list[Span] = []
    for span in sorted({span for file in inputs for span in file.spans}):
        before = spans[-1] if spans else None
        if before is not None and before.query == span.query:
            between = Span(span.query, before.last + 1, span.first - 1)
            if not any(between.covers(other) for other in of_others):
                spans[-1] = Span(span.query, before.first, max(before.last, span.last))
                continue
        spans.append(span)
    return tuple(spans)


def parse_path(path: str) -> IndexFile | None:
    """Parses a path below the index's folder; None: it is none of ours."""
    for pattern, made_of in _FORMS:
        if match := pattern.fullmatch(path):
            with suppress(ValueError):  # an hour that no calendar has
                return made_of(match)
    return None


def _batch_of(match: re.Match[str]) -> IndexFile:
    return BatchFile(_began_ms(match["hour"]), match["query"], int(match["batch"]))


def _merged_of(match: re.Match[str]) -> IndexFile:
    spans = tuple(Span(q, int(a), int(b)) for q, a, b in _SPAN.findall(match["spans"]))
    numbers = (int(match[name]) for name in ("part", "parts", "from", "to"))
    return MergedFile(_began_ms(match["hour"]), spans, *numbers)


def _accepted_of(match: re.Match[str]) -> IndexFile:
    seqs = int(match["first"]), int(match["last"])
    return AcceptedFile(_began_ms(match["hour"]), match["wheel"], *seqs)


def _bad_of(match: re.Match[str]) -> IndexFile:
    numbers = int(match["batch"]), int(match["records"])
    return BadFile(_began_ms(match["hour"]), match["query"], *numbers)


def _gap_of(match: re.Match[str]) -> IndexFile:
    return Gap(int(match["from"]), int(match["to"]), match["query"])


_HOUR: Final = r"(?P<hour>\d{4}-\d\d-\d\dT\d\d)"
_QUERY: Final = r"(?P<query>[0-9a-f]{12})"
_SPAN: Final = re.compile(r"([0-9a-f]{12})\.([0-9]+)\.([0-9]+)")
_FORMS: Final = (
    (re.compile(rf"{_HOUR}/b-{_QUERY}-(?P<batch>\d+)\.parquet"), _batch_of),
    (
        re.compile(
            rf"{_HOUR}/c-(?P<spans>{_SPAN.pattern}(?:\+{_SPAN.pattern})*)"
            r"-(?P<part>\d{4})-(?P<parts>\d{4})-(?P<from>\d{10})-(?P<to>\d{10})\.parquet"
        ),
        _merged_of,
    ),
    (
        re.compile(
            rf"{_HOUR}/a-(?P<wheel>[a-z0-9][a-z0-9-]*\.[1-9]\d*)"
            r"-(?P<first>\d{19})-(?P<last>\d{19})\.parquet"
        ),
        _accepted_of,
    ),
    (
        re.compile(rf"bad/{_HOUR}-{_QUERY}-(?P<batch>\d+)-(?P<records>\d+)\.jsonl"),
        _bad_of,
    ),
    (re.compile(rf"gaps/(?P<from>\d{{13}})-(?P<to>\d{{13}})-{_QUERY}\.json"), _gap_of),
)


def hour_name(hour_ms: int) -> str:
    """Returns the name of an hour's folder."""
    return f"{datetime.fromtimestamp(hour_ms // 1000, UTC):%Y-%m-%dT%H}"


def seconds_of(earliest_ms: int | None, latest_ms: int | None) -> tuple[int, int]:
    """Returns the times of a part's name; a time that is missing or no name has is any."""
    from_s = 0 if earliest_ms is None else min(max(0, earliest_ms // 1000), _LATEST_S)
    to_s = _LATEST_S if latest_ms is None else min(max(0, latest_ms // 1000), _LATEST_S)
    return from_s, to_s


def _hour_of(file: EventFile) -> int:
    return file.hour_ms


def _began_ms(hour: str) -> int:
    return int(datetime.fromisoformat(f"{hour}:00:00+00:00").timestamp()) * 1000


def _counting(of_hour: list[EventFile]) -> list[EventFile]:
    """Returns which files of an hour count."""
    sets: dict[tuple[tuple[Span, ...], int], list[MergedFile]] = {}
    for file in of_hour:
        if isinstance(file, MergedFile):
            sets.setdefault((file.spans, file.parts), []).append(file)
    whole = {
        spans: parts
        for (spans, count), parts in sorted(sets.items())
        if {part.part for part in parts} == set(range(1, count + 1)) and len(parts) == count
    }
    largest = {s for s in whole if not any(t != s and _covers(t, s) for t in whole)}
    counting: list[EventFile] = [f for f in of_hour if isinstance(f, AcceptedFile)]
    for spans in largest:
        counting += whole[spans]
    counting += [
        f
        for f in of_hour
        if isinstance(f, BatchFile) and not any(_covers(spans, f.spans) for spans in largest)
    ]
    return sorted(counting, key=lambda file: file.path)


def _broken(of_hour: Iterable[EventFile], counting: Iterable[EventFile]) -> list[MergedFile]:
    """Returns parts of sets that are not whole, and whose inputs are gone all the same."""
    there = [s for f in counting if not isinstance(f, AcceptedFile) for s in f.spans]

    def is_there(spans: tuple[Span, ...]) -> bool:
        ends = [Span(s.query, batch, batch) for s in spans for batch in (s.first, s.last)]
        return all(any(other.covers(end) for other in there) for end in ends)

    return [f for f in of_hour if isinstance(f, MergedFile) and not is_there(f.spans)]


def _covers(spans: tuple[Span, ...], others: tuple[Span, ...]) -> bool:
    return all(any(span.covers(other) for span in spans) for other in others)


def _may_have(file: EventFile, from_ms: int, to_ms: int) -> bool:
    match file:
        case MergedFile():
            return file.from_s * 1000 < to_ms and (file.to_s + 1) * 1000 > from_ms
        case AcceptedFile():
            return file.hour_ms < to_ms and file.hour_ms + HOUR_MS > from_ms
        case BatchFile():
            return file.hour_ms + HOUR_MS + CLOCKS_DIFFER_MS > from_ms
