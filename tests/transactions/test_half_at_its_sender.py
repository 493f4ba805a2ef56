"""What a half at its sender says, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from delaywheel.errors import MessageInvalidError, TimedOutError
from delaywheel.headers import decode_headers
from delaywheel.message import Handle, Message
from delaywheel.transactions.half import (
    AsyncHalf,
    CommitOutcome,
    Half,
    Halves,
    RollbackOutcome,
    half_message,
    half_of,
)

OutcomeT = TypeVar("OutcomeT", CommitOutcome, RollbackOutcome)


def message(**options: object) -> Message:
    return half_message("orders", b"v", "shop", "3s", {**options})  # type: ignore[typeddict-item]


def headers_of(half: Message) -> dict[str, bytes | None]:
    return dict(decode_headers(half.encoded_headers))


class Told:
    """Makes halves, and notes what they say."""

    def __init__(self, *, fails: bool = False) -> None:
        self.said: list[str] = []
        self._fails = fails

    def half(self) -> Half:
        handle = Handle("a.1", 1, bytes(16), "orders")
        return Half(
            message(),
            handle,
            self._say("commit", CommitOutcome.COMMITTED),
            self._say("rollback", RollbackOutcome.LEFT_TO_CHECK),
        )

    def _say(self, what: str, outcome: OutcomeT) -> Callable[[Half], OutcomeT]:
        def say(_: Half) -> OutcomeT:
            self.said.append(what)
            if self._fails:
                raise TimedOutError("nobody answers", outcome_known=False)
            return outcome

        return say


def test_no_end_of_a_block_says_anything(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    with told.half() as half:
        pass
    assert (told.said, half.outcome) == ([], None)
    (warning,) = caplog.records
    assert half.id.hex() in warning.getMessage()
    with pytest.raises(KeyError), told.half():
        raise KeyError
    with told.half() as half:
        half.commit()
        assert half.outcome is CommitOutcome.COMMITTED
    with told.half() as half:
        assert half.rollback() is half.outcome is RollbackOutcome.LEFT_TO_CHECK
    assert told.said == ["commit", "rollback"]
    assert len(caplog.records) == 1


def test_what_is_not_heard_is_left_to_the_check(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(fails=True)
    half = told.half()
    assert half.outcome is None
    said: list[object] = [half.commit(), half.outcome, half.rollback(), half.outcome]
    assert said == [CommitOutcome.LEFT_TO_CHECK] * 2 + [RollbackOutcome.LEFT_TO_CHECK] * 2
    assert [record.getMessage().split(" of ")[0] for record in caplog.records] == [
        "the commit",
        "the rollback",
    ]


def test_a_commit_of_what_was_cancelled_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    rolled_back = CommitOutcome.ROLLED_BACK
    one = Half(
        message(),
        Handle("a.1", 1, bytes(16), "orders"),
        lambda _: rolled_back,
        lambda _: RollbackOutcome.ROLLED_BACK,
    )
    assert one.commit() is one.outcome is rolled_back
    many = Halves([Told().half()], lambda halves: [rolled_back] * len(halves))
    many.commit()
    assert many[0].outcome is rolled_back
    single, both = (record.getMessage() for record in caplog.records)
    assert single == f"half {one.id.hex()} was cancelled before its commit: not sent"
    assert both == "1 of 1 halves were cancelled before their commit: not sent"


def test_many_are_committed_by_one_call_without_those_that_said_something(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told, named = Told(), list[bytes]()

    def commit(halves: Sequence[Half]) -> list[CommitOutcome | TimedOutError]:
        named.extend(half.id for half in halves)
        lost = TimedOutError("nobody answers", outcome_known=False)
        results: list[CommitOutcome | TimedOutError] = [CommitOutcome.COMMITTED, lost]
        return results[: len(halves)]

    with Halves([told.half() for _ in range(3)], commit) as halves:
        halves[1].rollback()
        halves.commit()
    assert named == [halves[0].id, halves[2].id]
    left = RollbackOutcome.LEFT_TO_CHECK, CommitOutcome.LEFT_TO_CHECK
    assert [half.outcome for half in halves] == [CommitOutcome.COMMITTED, *left]
    assert len(caplog.records) == 1
    with Halves([told.half()], commit):
        pass
    assert len(named) == 2
    assert "1 of 1 halves" in caplog.records[1].getMessage()


def test_many_that_could_not_be_said_are_left_to_the_check() -> None:
    def commit(_: Sequence[Half]) -> list[CommitOutcome]:
        raise TimedOutError("the client is closed", outcome_known=True)

    halves = Halves([Told().half()], commit)
    halves.commit()
    assert halves[0].outcome is CommitOutcome.LEFT_TO_CHECK


def test_the_same_for_asyncio() -> None:
    said: list[str] = []

    async def commit(_: AsyncHalf) -> CommitOutcome:
        said.append("commit")
        return CommitOutcome.LEFT_TO_CHECK

    async def rollback(_: AsyncHalf) -> RollbackOutcome:
        said.append("rollback")
        return RollbackOutcome.ROLLED_BACK

    async def send() -> None:
        handle = Handle("a.1", 1, bytes(16), "orders")
        async with AsyncHalf(message(), handle, commit, rollback) as half:
            pass
        said.append(str(half.outcome))
        assert await half.commit() is half.outcome is CommitOutcome.LEFT_TO_CHECK
        async with AsyncHalf(message(), handle, commit, rollback) as half:
            assert await half.rollback() is half.outcome is RollbackOutcome.ROLLED_BACK

    asyncio.run(send())
    assert said == ["None", "commit", "rollback"]


def test_a_half_is_due_at_the_end_of_its_hold_and_says_when_its_message_is() -> None:
    now = message(headers={"x": b"1"})
    assert headers_of(now) == {"x": b"1", "dw-half": b"shop"}
    assert now.length_bytes == 1 + len(now.encoded_headers)
    later = message(delay="30m")
    assert later.due_ms is not None
    assert int(headers_of(later)["dw-half-deliver-at"] or 0) - later.due_ms in range(
        1_796_000, 1_797_001
    )
    same = message(delay="3s")
    assert headers_of(same)["dw-half-deliver-at"] != b"%d" % (same.due_ms or 0)
    with pytest.raises(MessageInvalidError):
        message(level="30s")
    with pytest.raises(MessageInvalidError):
        half_message("orders", b"v", "shop", "soon", {})
    made = Message("orders", b"v", delay="0s", headers={"x": b"1"})
    held = half_of(made, "shop", "3s")
    assert (held.id, held.has_own_id, headers_of(held)) == (made.id, False, headers_of(now))
    assert dict(decode_headers(made.encoded_headers)) == {"x": b"1"}
