"""Proposals of other dues: examined together, in pieces, and those without a second first."""

from __future__ import annotations

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.reading.cancels import FINDING_FRAMES, Budget, CancelLook
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.cleaner.delivery import proposals as proposing
from delaywheel_replica.cleaner.delivery.proposals import FRAMES_AT_ONCE, ProposalSearch
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import MessageKey, RescheduleProposal
from support.due.leader import START_MS, Leader, message
from support.due.wheels import Sent, Wheels

A1, B1 = WheelId("a", 1), WheelId("b", 1)
LATER_MS = START_MS + 60_000
AT = Position(A1, 1, 0)


class Counting:
    """Counts the requests to a leader's reader."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self.frames: list[int] = []
        """For each search, how many were read."""
        self.looks = 0

    def new_search(self) -> ProposalSearch:
        return ProposalSearch(self.look_for_cancels)

    def search(
        self, proposals: ProposalSearch, proposed: list[RescheduleProposal]
    ) -> list[RescheduleProposal]:
        self.frames.append(0)
        return proposals.uncancelled(proposed)

    def look_for_cancels(self, look: CancelLook, budget: Budget) -> bool:
        before = budget.frames
        is_whole = self._leader.reader.look_for_cancels(look, budget)
        self.frames[-1] += before - budget.frames
        self.looks += 1
        return is_whole


def proposal_of(sent: Sent, looked: tuple[tuple[WheelId, int], ...] = ()) -> RescheduleProposal:
    return RescheduleProposal(
        MessageKey(sent.id, sent.due_ms, sent.topic), sent.due_ms + 60_000, AT, looked
    )


def cancels(wheels: Wheels, count: int, due_ms: int = LATER_MS) -> None:
    """A number of frames, each with one cancel."""
    for number in range(count):
        wheels.cancel(A1, [message(due_ms, 10_000 + number)])


def test_a_seconds_cancels_are_read_once_for_all_proposals(wheels: Wheels) -> None:
    sent = [message(LATER_MS + n, n) for n in range(100)]
    wheels.write(A1, sent)
    cancels(wheels, 200)
    wheels.cancel(A1, [sent[7], sent[9]])
    proposed = [proposal_of(each) for each in sent]
    with Leader(wheels) as leader:
        leader.forward(START_MS + 1_000)
        counting = Counting(leader)
        found = counting.search(proposals := counting.new_search(), proposed)
        assert found == [proposal for n, proposal in enumerate(proposed) if n not in {7, 9}]
        assert counting.frames == [201 + FINDING_FRAMES]
        assert counting.search(proposals, proposed[:3]) == proposed[:3]
        assert counting.frames[1] == 0


def test_rows_of_an_index_are_read_once_for_all_seconds(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of thirty seconds read them anew, in each transaction."""
    sent = [message(LATER_MS + 1_000 * n, n) for n in range(30)]
    wheels.write(A1, sent)
    cancels(wheels, 100)
    reads: list[tuple[int, int]] = []
    rows = WheelReader.rows

    def counted(reader: WheelReader, first_seq: int, last_seq: int) -> object:
        reads.append((first_seq, last_seq))
        return rows(reader, first_seq, last_seq)

    with Leader(wheels) as leader:
        leader.forward(START_MS + 1_000)
        wheels.cancel(A1, [sent[17]])
        leader.forward(START_MS + 2_000)
        # The server has looked further for later seconds.
        proposed = [proposal_of(each, ((A1, 50 + n),)) for n, each in enumerate(sent)]
        monkeypatch.setattr(WheelReader, "rows", counted)
        counting = Counting(leader)
        found = counting.search(counting.new_search(), proposed)
    assert found == [proposal for n, proposal in enumerate(proposed) if n != 17]
    assert len(reads) == 1


def test_only_what_came_since_the_server_looked_is_read(wheels: Wheels) -> None:
    """From the earliest look of all proposals, in each wheel; a new wheel as a whole."""
    first, second, third = (message(LATER_MS + n, n) for n in range(3))
    wheels.write(A1, [first, second, third])
    cancels(wheels, 100)
    early, late = ((A1, 101),), ((A1, 103),)
    wheels.cancel(A1, [second])
    cancels(wheels, 1)
    with Leader(wheels) as leader:
        leader.forward(START_MS + 1_000)
        counting = Counting(leader)
        assert counting.search(counting.new_search(), [proposal_of(first, late)]) == [
            proposal_of(first, late)
        ]
        assert counting.frames == [0]
        proposed = [proposal_of(first, late), proposal_of(second, early), proposal_of(third, late)]
        assert counting.search(proposals := counting.new_search(), proposed) == [
            proposed[0],
            proposed[2],
        ]
        assert counting.frames[1] == 2
        wheels.cancel(B1, [third])
        leader.forward(START_MS + 1_100)
        assert counting.search(proposals, proposed) == [proposed[0]]
        # Who did not say where it looked is looked at from the beginning.
        assert counting.search(counting.new_search(), [*proposed[:2], proposal_of(third)]) == [
            proposed[0]
        ]
        assert counting.frames[-1] > 100


def test_many_cancels_are_read_in_turns_and_keep_no_other_second_waiting(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposing, "FRAMES_AT_ONCE", 64)
    many, few = message(LATER_MS, 1), message(LATER_MS + 5_000, 2)
    wheels.write(A1, [many, few])
    cancels(wheels, 300)
    with Leader(wheels) as leader:
        leader.forward(START_MS + 1_000)
        counting = Counting(leader)
        proposals, first = (
            counting.new_search(),
            dict[RescheduleProposal, int](),
        )
        for number in range(20):
            for proposal in counting.search(proposals, [proposal_of(many), proposal_of(few)]):
                first.setdefault(proposal, number)
        assert first[proposal_of(few)] <= 1, "the second without cancels is known at once"
        assert first[proposal_of(many)] >= 4, "the other one takes several searches"
        assert max(counting.frames) <= 64 + FINDING_FRAMES


def test_what_is_proposed_while_a_second_is_read_is_looked_at_next(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposing, "FRAMES_AT_ONCE", 64)
    first, later, gone = (message(LATER_MS + n, n) for n in range(3))
    wheels.write(A1, [first, later, gone])
    wheels.cancel(A1, [gone])
    cancels(wheels, 100)
    with Leader(wheels) as leader:
        leader.forward(START_MS + 1_000)
        counting = Counting(leader)
        proposals = counting.new_search()
        assert counting.search(proposals, [proposal_of(first)]) == []
        everyone = [proposal_of(first), proposal_of(later), proposal_of(gone)]
        found = set[RescheduleProposal]()
        for _ in range(20):
            found.update(counting.search(proposals, everyone))
        assert found == set(everyone[:2])


def test_what_is_proposed_no_more_is_forgotten(wheels: Wheels) -> None:
    with Leader(wheels) as leader:
        leader.forward(START_MS + 1_000)
        proposals = (counting := Counting(leader)).new_search()
        for number in range(3 * FRAMES_AT_ONCE):
            sent = message(LATER_MS + 1000 * number, number)
            assert counting.search(proposals, [proposal_of(sent)])
        assert len(proposals._seconds) <= 257  # what it holds on to, whatever is asked
