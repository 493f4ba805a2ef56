"""What is said of new messages whose ids may have been used before. Starts no process."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.server.changing import id_checks
from delaywheel_replica.server.changing.id_checks import IdChecks
from delaywheel_replica.server.changing.pending import DecisionBasis
from delaywheel_replica.server.intake.validate import RequestBatch
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import ComparedCopy, Found
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import RequestRefusedError
from support.core.values import heartbeat, wheel_heartbeat, wheel_record_of
from support.wheels.messages import Message, columns_of

OWN = WheelId("a", 1)
COPY, SECOND, CANCEL = (Position(OWN, seq, 0) for seq in (1, 2, 3))
DUE_MS = wall_ms() + 3_600_000
NEW = Message(DUE_MS, bytes(16), "orders", b"k", b"v", (("h", b"1"),))
OTHERS = [
    replace(NEW, key=None),
    replace(NEW, key=b"kv", value=b""),
    replace(NEW, value=b"w"),
    replace(NEW, headers=(("h", None),)),
    replace(NEW, partition=1),
    replace(NEW, timestamp_ms=1),
]
CHECKED, UNKNOWN = "checked", "unknown"


@dataclass
class Site:
    """Node a, which has one wheel.

    Attributes:
        found: what it finds, of each id.
        stored: what lies there; None cannot be read.
        progress_seq: how far the committed progress has come in its wheel.
        held: how far the node holds it.
        looks: how many ids were looked up at once.
        stuck: the thread of lookups is busy until this is set.
        stuck_for: with this one's.
    """

    found: Found | Exception = field(default_factory=Found)
    stored: dict[Position, Message | None] = field(default_factory=dict)
    progress_seq: int = 3
    held: int = 3
    is_finished: bool = False
    looks: list[int] = field(default_factory=list)
    stuck: asyncio.Event | None = None
    stuck_for: Hashable = ""
    counts: NodeCounts = field(default_factory=NodeCounts)

    def __post_init__(self) -> None:
        progress = Progress(DUE_MS - 1_000, None, {OWN: self.progress_seq})
        self.status = CleanerStatus(
            node="a",
            boot="boot",
            pid=1,
            monotonic_ms=monotonic_ms(),
            wall_ms=0,
            role=Role.STANDBY,
            progress=progress,
            wheels={OWN: wheel_record_of("a")},
        )
        queries = cast("Queries", self)
        self.checks = IdChecks(queries, self._basis_of_look, self.counts)

    def _basis_of_look(self) -> DecisionBasis:
        own = heartbeat("a", wheels={OWN: wheel_heartbeat(self.held)})
        return DecisionBasis(wall_ms(), self.status, None, leading=False, clock_skew_ms=0).of_look(
            own
        )

    def is_deleted(self, _reference: Reference) -> bool:
        return self.is_finished

    def knows_all(self) -> bool:
        return isinstance(self.found, Found) and self.found.complete

    async def are_absent(
        self, references: Sequence[Reference], sharer: Hashable
    ) -> NDArray[np.bool_]:
        self.looks.append(len(references))
        if self.stuck is not None and sharer == self.stuck_for:
            await self.stuck.wait()
        if isinstance(self.found, Exception):
            raise self.found
        found = self.found
        is_absent = not (found.copies or found.cancels) and found.readable
        return np.full(len(references), is_absent)

    async def find_many(
        self, references: Sequence[Reference], _sharer: Hashable
    ) -> list[Found | RequestRefusedError]:
        assert isinstance(self.found, Found)
        return [self.found] * len(references)

    async def are_same(
        self, copies: Sequence[ComparedCopy], _sharer: Hashable
    ) -> list[bool | None]:
        stored = ((self.stored[copy.place], copy) for copy in copies)
        return [
            None if message is None else copy.columns.is_same(copy.row, columns_of([message]), 0)
            for message, copy in stored
        ]

    async def outcome(self, *messages: Message, sharer: Hashable = "") -> list[str]:
        """What is said of each message of a request."""
        batch = RequestBatch(columns_of(list(messages)), np.arange(len(messages)))
        await self.checks.check(batch, sharer)
        said = dict.fromkeys(range(len(messages)), UNKNOWN)
        said |= dict.fromkeys(batch.checked, CHECKED)
        said |= {row: refusal.reason for row, refusal in batch.refusals.items()}
        assert self.counts.unchecked_ids == [*said.values()].count(UNKNOWN)
        return [*said.values()]


def copy(**others: object) -> Found:
    return replace(Found(dues_ms=(DUE_MS,), copies=[COPY]), **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("site", "said"),
    [
        (lambda: Site(is_finished=True), UNKNOWN),
        (lambda: Site(Found()), CHECKED),
        (lambda: Site(Found(complete=False)), UNKNOWN),
        (lambda: Site(copy(), {COPY: NEW}), CHECKED),
        (lambda: Site(copy(complete=False), {COPY: NEW}), UNKNOWN),
        *((lambda other=other: Site(copy(), {COPY: other}), Reason.ID_TAKEN) for other in OTHERS),
        (lambda: Site(copy(complete=False), {COPY: OTHERS[0]}), Reason.ID_TAKEN),
        (lambda: Site(copy(), {COPY: None}), UNKNOWN),
        (lambda: Site(copy(copies=[COPY, SECOND]), {COPY: OTHERS[0], SECOND: NEW}), CHECKED),
        (lambda: Site(copy(copies=[COPY, SECOND]), {COPY: OTHERS[0], SECOND: None}), UNKNOWN),
        (lambda: Site(copy(cancels=[CANCEL]), {COPY: NEW}), Reason.ID_CANCELLED),
        (lambda: Site(copy(cancels=[CANCEL]), {COPY: OTHERS[0]}), Reason.ID_CANCELLED),
        (lambda: Site(copy(cancels=[CANCEL]), {COPY: NEW}, progress_seq=2), UNKNOWN),
        (lambda: Site(copy(cancels=[CANCEL]), {COPY: OTHERS[0]}, progress_seq=2), Reason.ID_TAKEN),
        (lambda: Site(copy(cancels=[CANCEL]), {COPY: NEW}, held=2), UNKNOWN),
        (lambda: Site(copy(cancels=[CANCEL], readable=False), {COPY: NEW}), UNKNOWN),
        (
            lambda: Site(copy(cancels=[CANCEL], rescheduled_to=DUE_MS + 1), {COPY: NEW}),
            CHECKED,
        ),
    ],
)
async def test_each_line_of_the_table(
    site: type[Site], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_checks, "CANCEL_WAIT_S", 0.3)
    assert await site().outcome(NEW) == [said]


async def test_a_cancel_may_be_decided_while_a_message_waits() -> None:
    """Where it is sent again to another node than the leader's."""

    class Standby(Site):
        async def find_many(
            self, references: Sequence[Reference], sharer: Hashable
        ) -> list[Found | RequestRefusedError]:
            progress = Progress(DUE_MS - 1_000, None, {OWN: 3})
            self.status = replace(self.status, progress=progress)
            return await super().find_many(references, sharer)

    site = Standby(copy(cancels=[CANCEL]), {COPY: NEW}, progress_seq=2)
    assert await site.outcome(NEW) == [Reason.ID_CANCELLED]
    assert site.looks == [1, 1]


async def test_one_request_may_have_an_id_twice_but_not_with_two_contents() -> None:
    site = Site()
    others = replace(OTHERS[0], due_ms=DUE_MS + 1), replace(OTHERS[0], topic="bills")
    said = await site.outcome(NEW, NEW, OTHERS[0], *others)
    assert said == [CHECKED, CHECKED, Reason.ID_TAKEN, CHECKED, CHECKED]


async def test_few_seconds_are_looked_at_at_once_and_requests_together() -> None:
    site = Site()
    later = [replace(NEW, due_ms=DUE_MS + 1_000 * number) for number in range(12)]
    said = await asyncio.gather(site.outcome(*later), site.outcome(*later))
    assert [*said] == [[CHECKED] * 12] * 2
    assert site.looks == [16, 8]


async def test_what_waits_too_long_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it looked up later."""
    monkeypatch.setattr(id_checks, "WAIT_S", 0.01)
    site = Site(stuck=asyncio.Event())
    assert await site.outcome(NEW) == [UNKNOWN]
    site.counts.unchecked_ids = 0
    assert await site.outcome(NEW) == [UNKNOWN]
    assert site.stuck is not None
    site.stuck.set()
    monkeypatch.setattr(id_checks, "WAIT_S", 60)
    site.counts.unchecked_ids = 0
    assert await site.outcome(NEW) == [CHECKED]
    assert site.looks == [1, 1]


async def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_checks, "WAITING_AT_MOST", 4)
    site = Site()
    assert await site.outcome(NEW, NEW, NEW) == [CHECKED, CHECKED, UNKNOWN]
    assert site.looks == [2]


async def test_who_has_many_ids_looked_for_takes_neither_turns_nor_room_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20,000 of one principal's, in as many seconds, left everybody's unchecked."""
    monkeypatch.setattr(id_checks, "WAITING_AT_MOST", 24)
    site = Site(stuck=asyncio.Event(), stuck_for="many")
    later = [replace(NEW, due_ms=DUE_MS + 1_000 * number) for number in range(24)]
    many = asyncio.create_task(site.outcome(*later, sharer="many"))
    await asyncio.sleep(0)
    assert await site.outcome(NEW, sharer="another") == [CHECKED]
    assert site.looks == [8, 1]
    assert site.stuck is not None
    site.stuck.set()
    assert await many == [CHECKED] * 12 + [UNKNOWN] * 12


async def test_a_disk_that_cannot_be_read_refuses_nothing() -> None:
    site = Site(OSError("no medium"))
    assert await site.outcome(NEW) == [UNKNOWN]
