"""Names of an index's files: what counts at every moment, whatever a crash has left."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from delaywheel_trace.index.layout import (
    HOUR_MS,
    AcceptedFile,
    BadFile,
    BatchFile,
    Gap,
    Layout,
    MergedFile,
    Span,
    parse_path,
    seconds_of,
    spans_of,
)

QUERIES = ("0190163d8694", "a1b2c3d4e5f6")
HOUR = 1_900_000_800_000 // HOUR_MS * HOUR_MS
FILES = (
    BatchFile(HOUR, QUERIES[0], 17),
    MergedFile(HOUR, (Span(QUERIES[0], 1, 17), Span(QUERIES[1], 0, 3)), 2, 3, 1, 9_999_999_999),
    AcceptedFile(HOUR, "n-1.7", 1, 1_310_398),
    BadFile(HOUR, QUERIES[0], 17, 2),
    Gap(0, HOUR, QUERIES[1]),
)


def test_names_say_all_of_a_file() -> None:
    for file in FILES:
        assert parse_path(file.path) == file


def test_the_longest_name_is_one() -> None:
    spans = tuple(Span(f"{n:012x}", 99_999_999, 99_999_999) for n in range(6))
    name = MergedFile(HOUR, spans, 9_999, 9_999, 0, 9_999_999_999).path.partition("/")[2]
    assert len(name) <= 255


def test_what_is_no_file_of_an_index_is_passed_over() -> None:
    strange = ("lock", "2030-02-31T10/b-0190163d8694-1.parquet", "2030-03-17T16/x.parquet")
    assert Layout.of(strange) == Layout((), (), (), ())


def test_times_that_no_name_has() -> None:
    assert seconds_of(None, None) == (0, 9_999_999_999)
    assert seconds_of(-5, 10**15) == (0, 9_999_999_999)
    assert seconds_of(1_999, 2_000) == (1, 2)


def test_a_merge_names_no_batch_that_is_another_files() -> None:
    batches = [BatchFile(HOUR, QUERIES[0], number) for number in (1, 2, 5, 9)]
    assert spans_of(batches) == (Span(QUERIES[0], 1, 9),)
    assert spans_of(batches, [BatchFile(HOUR, QUERIES[0], 7)]) == (
        Span(QUERIES[0], 1, 5),
        Span(QUERIES[0], 9, 9),
    )


def test_a_range_is_answered_by_files_that_may_have_its_events() -> None:
    late = MergedFile(
        HOUR + 30 * HOUR_MS, (Span(QUERIES[0], 0, 3),), 1, 1, HOUR // 1000, HOUR // 1000
    )
    now = BatchFile(HOUR + 31 * HOUR_MS, QUERIES[0], 4)
    old = BatchFile(HOUR - 2 * HOUR_MS, QUERIES[0], 0)
    accepted = AcceptedFile(HOUR, "n1.1", 1, 5)
    layout = Layout.of([file.path for file in (late, now, old, accepted)])
    assert set(layout.between(HOUR, HOUR + 1)) == {late, now, accepted}
    assert layout.between(HOUR + 60_000, HOUR + HOUR_MS) == [accepted, now]
    assert layout.begins_ms == HOUR - 2 * HOUR_MS
    assert layout.ends_ms() == {"n1.1": HOUR + HOUR_MS}


def test_gaps_and_bad_records_of_a_range() -> None:
    layout = Layout.of([file.path for file in FILES])
    assert layout.gaps_between(HOUR - 1, HOUR) == [Gap(0, HOUR, QUERIES[1])]
    assert layout.gaps_between(HOUR + 1, HOUR + 2) == []
    assert (layout.bad_between(HOUR, HOUR + 1), layout.bad_between(0, HOUR)) == (2, 0)


def test_a_set_that_somebody_took_a_part_of_stays_known_as_that() -> None:
    """It is searched as far as it is there, and neither deleted nor hidden by a merge."""
    span = Span(QUERIES[0], 4, 6)
    parts = [MergedFile(HOUR, (span,), part, 3, 0, 1) for part in (1, 3)]
    batches = [BatchFile(HOUR, QUERIES[0], number) for number in (3, 7)]
    named = [part.path for part in parts]
    layout = Layout.of([*named, *(batch.path for batch in batches)])
    assert (layout.broken, layout.stale) == (tuple(parts), ())
    assert set(layout.counting) == {*parts, *batches}
    assert layout.inputs(HOUR) == [[batches[0]], [batches[1]]]
    assert spans_of(batches, layout.broken) == tuple(Span(QUERIES[0], n, n) for n in (3, 7))
    placing = [BatchFile(HOUR, QUERIES[0], number) for number in (4, 6)]
    layout = Layout.of([*named, *(batch.path for batch in placing)])
    assert (layout.broken, set(layout.stale)) == ((), set(parts))


@dataclass
class Job:
    """The one process that writes, as its steps; content outlives what is deleted."""

    there: set[str] = field(default_factory=set)
    content: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def write(self, query: str) -> None:
        batch = self.written.get(query, -1) + 1
        self.put(BatchFile(HOUR, query, batch).path, {(query, batch)})
        self.written[query] = batch

    def put(self, path: str, rows: set[tuple[str, int]]) -> None:
        assert self.content.setdefault(path, rows) == rows, "another content under one name"
        self.there.add(path)

    def merge(self, take: int, crash_after: int) -> None:
        """Merges the newest files that count, as many parts as their rows make; may crash."""
        counting = Layout.of(self.there).inputs(HOUR)
        if len(counting) < 2:
            return
        inputs = [file for files in counting[-take:] for file in files]
        spans = spans_of(inputs, [file for files in counting[:-take] for file in files])
        rows = sorted({row for file in inputs for row in self.content[file.path]})
        parts = -(-len(rows) // 4)
        for part in range(parts)[:crash_after]:
            path = MergedFile(HOUR, spans, part + 1, parts, 0, 1).path
            self.put(path, set(rows[part::parts]))

    def clean(self, crash_after: int) -> None:
        for file in Layout.of(self.there).stale[:crash_after]:
            self.there.discard(file.path)

    def seen(self) -> list[tuple[str, int]]:
        layout = Layout.of(self.there)
        assert layout.broken == ()
        return sorted(row for file in layout.counting for row in self.content[file.path])


STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(QUERIES)),
    st.tuples(st.just("merge"), st.integers(2, 9), st.integers(0, 5)),
    st.tuples(st.just("clean"), st.integers(0, 9)),
)


@given(st.lists(STEPS, max_size=30))
def test_each_event_counts_once_after_every_step_and_every_crash(
    steps: list[tuple[object, ...]],
) -> None:
    job = Job()
    for name, *arguments in steps:
        getattr(job, str(name))(*arguments)
        expected = [(q, n) for q, last in sorted(job.written.items()) for n in range(last + 1)]
        assert job.seen() == expected, (name, arguments)
