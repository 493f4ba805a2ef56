"""The states of half messages: what a node says of one, alone and in the list of its second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from delaywheel.storage.frames.kinds import Kind
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.link import DeadLettered
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.naming import rows_naming
from delaywheel_replica.server.node.refusals import RequestRefusedError
from server.lookup.test_scan import A1, ID, LATE_MS, Site
from support.wheels.messages import BASE_SLOT, message

HALF = replace(message(1), due_ms=LATE_MS, headers=(("dw-half", b"shop"),))
WITH_DELAY = replace(HALF, headers=(*HALF.headers, ("dw-half-deliver-at", b"1")))
COMMIT, RELEASE, CANCEL = Kind.COMMITS, Kind.RELEASES, Kind.CANCELS
HELD, COMMITTED, ROLLED_BACK, ASKED, DONE, DELIVERED = (
    pb.MessageState.Value(f"MESSAGE_STATE_{name}")
    for name in ("HELD", "COMMITTED", "ROLLED_BACK", "ASKED", "DONE", "DELIVERED")
)
BEFORE, TAKEN = LATE_MS - 9, LATE_MS


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.queries.close()


def begin(site: Site, rows: Sequence[Kind], half: object = HALF) -> None:
    """Writes a half as frame 1, and the rows that name it behind it."""
    site.write(A1, half)  # type: ignore[arg-type]
    columns = rows_naming([MessageKey(ID, LATE_MS, "topic")])
    with site.opened(A1) as own:
        for kind in rows:
            own.append(columns, kind=kind, accepted_at_ms=1)


def commit(site: Site, due_ms: int, seq: int, *, seen: bool = True) -> None:
    """Commits a progress: w, and V of the one wheel."""
    site.progress, site.transactions = Progress(due_ms, None, {A1: seq}), site.transactions + 1
    if seen:
        site.know()


async def states(site: Site) -> tuple[int, int]:
    """The state of the half alone, and in its second."""
    got = await site.queries.get_message(Reference(BASE_SLOT, ID, "topic", LATE_MS))
    page = await site.queries.get_slot(pb.GetSlotRequest(slot=BASE_SLOT))
    (listed,) = page.messages
    return got.message.state, listed.state


@pytest.mark.parametrize(
    ("rows", "progress", "state"),
    [
        ((), [(BEFORE, 0)], HELD),
        ((COMMIT,), [(BEFORE, 1)], COMMITTED),
        ((RELEASE,), [(BEFORE, 1)], COMMITTED),
        ((COMMIT, CANCEL), [(BEFORE, 2)], COMMITTED),
        ((COMMIT, CANCEL), [(BEFORE, 3)], ROLLED_BACK),
        ((CANCEL,), [(BEFORE, 1)], HELD),
        ((CANCEL,), [], HELD),
        ((), [(BEFORE, 0), (TAKEN, 1)], ASKED),
        ((COMMIT,), [(BEFORE, 0), (TAKEN, 1), (TAKEN + 9, 2)], ASKED),
        ((RELEASE,), [(BEFORE, 0), (TAKEN, 1), (TAKEN + 9, 2)], ASKED),
        ((COMMIT, CANCEL), [(BEFORE, 0), (TAKEN, 3)], ROLLED_BACK),
        ((CANCEL,), [(BEFORE, 0), (TAKEN, 1), (TAKEN + 9, 2)], ASKED),
    ],
    ids=lambda value: (
        "".join(kind.name[:2] for kind in value) if isinstance(value, tuple) else str(value)
    ),
)
async def test_a_half_is_what_its_rows_say(
    site: Site, rows: Sequence[Kind], progress: Sequence[tuple[int, int]], state: int
) -> None:
    begin(site, rows)
    for due_ms, seq in progress:
        commit(site, due_ms, seq)
    assert await states(site) == (state, state)


@pytest.mark.parametrize("half", [HALF, WITH_DELAY], ids=["now", "later"])
@pytest.mark.parametrize(
    ("kind", "taken_at"), [(COMMIT, TAKEN), (RELEASE, BEFORE + 1)], ids=["commit", "release"]
)
async def test_one_that_was_forwarded_is_delivered_once_a_dead_letter_would_be_known(
    site: Site, kind: Kind, taken_at: int, half: object
) -> None:
    """With a delay, its message goes by another due from then on. A list says only: it ended."""
    begin(site, [kind], half)
    commit(site, BEFORE, 1)
    commit(site, taken_at, 2)
    assert await states(site) == (DONE, DONE)
    site.fates.heard(DeadLettered(0, 0, ()))
    for progress in (Progress(BEFORE, None, {A1: 1}), Progress(taken_at, None, {A1: 2})):
        site.progress = progress
        site.fates.row(site.known())
    assert await states(site) == (DELIVERED if half is HALF else COMMITTED, DONE)


async def test_a_handle_means_the_half_though_its_group_has_sent_the_message(site: Site) -> None:
    begin(site, [])
    commit(site, BEFORE, 0)
    commit(site, TAKEN, 1)
    handle = Reference(BASE_SLOT, ID, "topic", None, A1)
    answered = replace(message(1), due_ms=LATE_MS + 1)
    site.write(A1, answered)
    got = await site.queries.get_message(handle)
    assert (got.message.due_ms, got.message.state) == (LATE_MS, ASKED)
    site.write(A1, replace(answered, due_ms=LATE_MS + 2))
    with pytest.raises(RequestRefusedError, match="several dues"):
        await site.queries.get_message(handle)


async def test_two_dues_of_no_half_are_ambiguous(site: Site) -> None:
    for due_ms in (LATE_MS, LATE_MS + 1):
        site.write(A1, replace(message(1), due_ms=due_ms))
    with pytest.raises(RequestRefusedError, match="several dues"):
        await site.queries.get_message(Reference(BASE_SLOT, ID, "topic", None, A1))


async def test_what_happened_unseen_is_not_known(site: Site) -> None:
    begin(site, [COMMIT])
    commit(site, BEFORE, 1)
    commit(site, BEFORE + 1, 1, seen=False)
    commit(site, TAKEN, 2)
    assert await states(site) == (DONE, DONE)
