"""Errors in what callers hear: each answers an untruth."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cleaner.due.rows import MessageOutcome
from delaywheel_replica.cleaner.due.seconds import FORWARDED, Second
from delaywheel_replica.core.leader import cancel
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.server.changing import cancels
from delaywheel_replica.server.changing.cancels import CancelMany
from delaywheel_replica.server.changing.finder import MessageFinder
from delaywheel_replica.server.changing.half_commits import HalfCommits
from delaywheel_replica.server.changing.pending import Decided, DecisionBasis, Subject
from delaywheel_replica.server.changing.reschedules import Reschedules
from delaywheel_replica.server.cluster.fan_out import FanOut
from delaywheel_replica.server.commit import own_halves
from delaywheel_replica.server.commit.near_cancels import NearCancels
from delaywheel_replica.server.lookup import places
from delaywheel_replica.server.lookup.places import AskedPlaces
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.search import Search
from delaywheel_replica.server.node.refusals import RequestRefusedError
from delaywheel_replica.server.service import DelayWheelService
from sim.checking.truth import Key
from sim.mutants.mutant import Mutant, Patch, everywhere, instead
from sim.nodes import server


def _instead_of_writing(answer: CancelDecision) -> Callable[[], list[Patch]]:
    """Answers every cancel so that would be written."""
    decide = cancel.before_writing

    def before_writing(view: cancel.CancelView) -> CancelDecision:
        decision = decide(view)
        return answer if decision is CancelDecision.WRITE else decision

    return lambda: [everywhere(cancel.before_writing, before_writing)]


def cancelled_is_answered_not_found() -> list[Patch]:
    return [
        *_instead_of_writing(CancelDecision.NOT_FOUND)(),
        everywhere(cancel.others_to_ask, lambda _: 0),
    ]


def written_is_refused() -> list[Patch]:
    return [everywhere(server.verdict_of, lambda *_: Reason.DUE_TOO_OLD)]


def _moved(decide: Callable[[Any, Any], Decided]) -> Callable[[], list[Patch]]:
    """Answers reschedules without the leader."""

    async def answer(_self: Reschedules, attempt: Any, subject: Subject, _there: Any) -> Decided:
        return decide(attempt, subject)

    return lambda: [instead(Reschedules, "_decide", answer)]


def another_due_is_named() -> list[Patch]:
    real = Reschedules._until_copied

    async def until_copied(self: Reschedules, key: Key, moved_ms: int) -> int:
        return await real(self, key, moved_ms) + 7

    return [instead(Reschedules, "_until_copied", until_copied)]


def every_message_is_a_half() -> list[Patch]:
    async def is_half(*_: Any) -> bool:
        return True

    return [
        instead(MessageFinder, "is_half", is_half),
        instead(DecisionBasis, "may_be_half", lambda *_: True),
    ]


def commits_are_not_written() -> list[Patch]:
    async def write(*_: Any) -> dict[int, Any]:
        return {}

    return [instead(own_halves.CommitWriting, "write", write)]


def _shown_as(state: int) -> Callable[[], list[Patch]]:
    """Shows every message that is asked for in this state."""
    real = DelayWheelService._get

    async def get(self: DelayWheelService, *arguments: Any) -> pb.StoredMessage:
        message = await real(self, *arguments)
        message.state = state  # type: ignore[assignment]
        return message

    return lambda: [instead(DelayWheelService, "_get", get)]


def what_groups_answer_is_not_told() -> list[Patch]:
    return [instead(places, "_ANSWERED", {})]


def another_place_is_named() -> list[Patch]:
    real = AskedPlaces.add_place

    async def add_place(self: AskedPlaces, message: pb.StoredMessage, *asks: Any) -> None:
        await real(self, message, *asks)
        if message.place.offset:
            message.place.offset -= 1

    return [instead(AskedPlaces, "add_place", add_place)]


def nothing_is_found() -> list[Patch]:
    async def get(*_: Any) -> pb.StoredMessage:
        raise RequestRefusedError(Reason.MESSAGE_NOT_FOUND)

    return [instead(DelayWheelService, "_get", get)]


def _searched(change: Callable[[pb.SearchResponse], object]) -> Callable[[], list[Patch]]:
    real = Search.search

    async def search(self: Search, *arguments: Any) -> pb.SearchResponse:
        found = await real(self, *arguments)
        change(found)
        return found

    return lambda: [instead(Search, "search", search)]


def _leave_out_one(found: pb.SearchResponse) -> None:
    del found.messages[-1:]


def _show_another(found: pb.SearchResponse) -> None:
    for message in found.messages:
        message.id = message.id[::-1]


def cancels_count_for_nothing() -> list[Patch]:
    real = Second.outcomes

    def outcomes(self: Second, *arguments: Any) -> Any:
        found, differ = real(self, *arguments)
        found[found == MessageOutcome.CANCELLED] = FORWARDED
        return found, differ

    return [instead(Second, "outcomes", outcomes)]


def every_commit_is_left() -> list[Patch]:
    return [everywhere(own_halves.is_left_to_check, lambda *_: True)]


def every_half_is_rolled_back() -> list[Patch]:
    async def known(
        _self: HalfCommits, keys: Sequence[Key], _sharer: Hashable
    ) -> list[CancelDecision]:
        return [CancelDecision.CANCELLED] * len(keys)

    return [instead(HalfCommits, "_known", known)]


def no_commit_looks_for_a_cancel() -> list[Patch]:
    return [instead(NearCancels, "__contains__", lambda *_: False)]


def searches_find_halves() -> list[Patch]:
    return [instead(cancels, "_HALVES", frozenset())]


def what_is_found_is_not_cancelled() -> list[Patch]:
    async def results(
        _self: CancelMany, messages: Sequence[Any], _sharer: Hashable, **_: Any
    ) -> list[int]:
        return [pb.CANCEL_OUTCOME_CANCELLED] * len(messages)

    return [instead(CancelMany, "_results", results)]


def _read(change: Callable[[pb.GetSlotResponse], object]) -> Callable[[], list[Patch]]:
    real = Queries.get_slot

    async def get_slot(
        self: Queries, request: pb.GetSlotRequest, sharer: Hashable = ""
    ) -> pb.GetSlotResponse:
        answer = await real(self, request, sharer)
        change(answer)
        return answer

    return lambda: [instead(Queries, "get_slot", get_slot)]


def _call_it_done(found: pb.GetSlotResponse) -> None:
    for message in found.messages:
        message.state = pb.MESSAGE_STATE_DONE


def _counted(change: Callable[[pb.ListSlotsResponse], object]) -> Callable[[], list[Patch]]:
    real = FanOut.list_slots

    async def list_slots(self: FanOut, *arguments: Any) -> pb.ListSlotsResponse:
        answer = await real(self, *arguments)
        change(answer)
        return answer

    return lambda: [instead(FanOut, "list_slots", list_slots)]


def _count_one_more(found: pb.ListSlotsResponse) -> None:
    for row in found.slots:
        row.messages += 1


def _leave_out_a_second(found: pb.ListSlotsResponse) -> None:
    del found.slots[-1:]


def _described(change: Callable[[pb.DescribeClusterResponse], object]) -> Callable[[], list[Patch]]:
    real = FanOut.describe

    async def describe(self: FanOut, *arguments: Any) -> pb.DescribeClusterResponse:
        answer = await real(self, *arguments)
        change(answer)
        return answer

    return lambda: [instead(FanOut, "describe", describe)]


def _tell_of_more_progress(told: pb.DescribeClusterResponse) -> None:
    told.progress.due_ms += 60_000


def _tell_of_old_progress(told: pb.DescribeClusterResponse) -> None:
    told.progress.due_ms -= 60_000


def _count_copies(told: pb.DescribeClusterResponse) -> None:
    told.pending.messages *= 2


def _tell_of_nothing_pending(told: pb.DescribeClusterResponse) -> None:
    told.pending.messages = 0


def _tell_of_no_bytes(told: pb.DescribeClusterResponse) -> None:
    told.pending.length_bytes = 0


def _name_nobody(told: pb.DescribeClusterResponse) -> None:
    told.ClearField("leader")


ANSWERS = {
    "cancelled is answered without a row": Mutant(
        "who cancels is told that it is done, and nothing is written",
        _instead_of_writing(CancelDecision.CANCELLED),
        "reported cancelled, and no row says so",
        ("many_cancels",),
    ),
    "every cancel is too late": Mutant(
        "no message can be cancelled, however long before its due",
        _instead_of_writing(CancelDecision.TOO_LATE),
        "too late, and it is still to come",
        ("many_cancels",),
    ),
    "what was cancelled becomes a dead letter": Mutant(
        "cancels count for nothing, and the topic is not there",
        cancels_count_for_nothing,
        "is a dead letter after it was cancelled",
        ("cancelled_in_trouble",),
    ),
    "every cancel is too late for a delivery": Mutant(
        "what is to come is said to be delivered",
        _instead_of_writing(CancelDecision.ALREADY_DELIVERED),
        "is reported delivered and is not",
        ("answers_to_all",),
    ),
    "every cancel is of what was rescheduled": Mutant(
        "what nobody has given another due is said to have one",
        _instead_of_writing(CancelDecision.RESCHEDULED),
        "and nobody has decided that",
        ("answers_to_all",),
    ),
    "every cancel is of what is not found": Mutant(
        "what was accepted is said never to have been",
        cancelled_is_answered_not_found,
        "is reported not found",
        ("answers_to_all",),
    ),
    "every cancel is unknown": Mutant(
        "nobody is ever told what became of a cancel",
        _instead_of_writing(CancelDecision.UNKNOWN),
        "nobody knows what became of",
        ("long_asked",),
    ),
    "every cancel is without a leader": Mutant(
        "the leader's node sends callers away",
        _instead_of_writing(CancelDecision.NO_LEADER),
        "nobody knows what became of",
        ("long_asked",),
    ),
    "what is written is refused": Mutant(
        "who is told that a message is not accepted sends it as a new one: it comes twice",
        written_is_refused,
        "its caller was told that it is refused",
        ("answers_to_all",),
    ),
    "rescheduled without a decision": Mutant(
        "no leader knows of the new due",
        _moved(lambda attempt, _: Decided(CancelDecision.RESCHEDULED, attempt.to_ms)),
        "is reported rescheduled, and nobody has decided that",
        ("answers_to_all",),
    ),
    "rescheduled to another due": Mutant(
        "the answer names a due that the message does not have",
        another_due_is_named,
        "is reported to be due",
        ("answers_to_all",),
    ),
    "no reschedule of what is not cancelled": Mutant(
        "what nobody cancelled is said to be cancelled",
        _moved(lambda *_: Decided(CancelDecision.CANCELLED)),
        "is reported cancelled, and no row says so",
        ("answers_to_all",),
    ),
    "no reschedule of what is to come": Mutant(
        "it is said to be delivered",
        _moved(lambda *_: Decided(CancelDecision.ALREADY_DELIVERED)),
        "is reported delivered and is not",
        ("answers_to_all",),
    ),
    "no reschedule in good time": Mutant(
        "it is said to be too late",
        _moved(lambda *_: Decided(CancelDecision.TOO_LATE)),
        "too late, and it is still to come",
        ("answers_to_all",),
    ),
    "no reschedule of what is there": Mutant(
        "it is said never to have been accepted",
        _moved(lambda *_: Decided(CancelDecision.NOT_FOUND)),
        "is reported not found",
        ("answers_to_all",),
    ),
    "no reschedule, as of a half": Mutant(
        "every message is said to be a half",
        every_message_is_a_half,
        "is said to be a half, and is none",
        ("answers_to_all",),
    ),
    "committed is answered without a row": Mutant(
        "a half that is committed, as its sender hears, is asked about",
        commits_are_not_written,
        "is committed, as its caller is told, and no row says so",
        ("answers_to_all",),
    ),
    "everything is shown as pending": Mutant(
        "what was delivered is shown as to come",
        _shown_as(pb.MESSAGE_STATE_PENDING),
        "is shown as PENDING, and is not",
        ("answers_to_all",),
    ),
    "everything is shown as held": Mutant(
        "what is no half is shown as one",
        _shown_as(pb.MESSAGE_STATE_HELD),
        "is shown as HELD, and is not",
        ("answers_to_all",),
    ),
    "everything is shown as done": Mutant(
        "what is to come is shown as done",
        _shown_as(pb.MESSAGE_STATE_DONE),
        "is shown as DONE, and is not",
        ("answers_to_all",),
    ),
    "everything is shown as cancelled": Mutant(
        "what nobody cancelled is shown as never to come",
        _shown_as(pb.MESSAGE_STATE_CANCELLED),
        "is shown as CANCELLED, and is not",
        ("answers_to_all",),
    ),
    "everything is shown as rolled back": Mutant(
        "a half that was committed is shown as never to come",
        _shown_as(pb.MESSAGE_STATE_ROLLED_BACK),
        "is shown as ROLLED_BACK, and is not",
        ("answers_to_all",),
    ),
    "everything is shown as delivered": Mutant(
        "what is to come is shown as there",
        _shown_as(pb.MESSAGE_STATE_DELIVERED),
        "is shown as DELIVERED, and is not",
        ("answers_to_all",),
    ),
    "everything is shown as a dead letter": Mutant(
        "what is to come is shown as given up",
        _shown_as(pb.MESSAGE_STATE_DEAD_LETTERED),
        "is shown as DEAD_LETTERED, and is not",
        ("answers_to_all",),
    ),
    "everything is shown as committed": Mutant(
        "a half of which nobody has said anything is shown as on its way",
        _shown_as(pb.MESSAGE_STATE_COMMITTED),
        "is shown as COMMITTED, and is not",
        ("answers_to_all",),
    ),
    "everything is shown as asked": Mutant(
        "a half that is held is shown as one that its group was asked about",
        _shown_as(pb.MESSAGE_STATE_ASKED),
        "is shown as ASKED, and is not",
        ("answers_to_all",),
    ),
    "everything is shown as undecided": Mutant(
        "a half that nobody has given up is shown as one with which an operator has to do",
        _shown_as(pb.MESSAGE_STATE_UNDECIDED),
        "is shown as UNDECIDED, and is not",
        ("answers_to_all",),
    ),
    "what groups answer is not told": Mutant(
        "a half is shown as asked about for ever",
        what_groups_answer_is_not_told,
        "is shown as ASKED, and its group has answered",
        ("answers_to_all",),
    ),
    "a place is that of the record before": Mutant(
        "who looks at the place finds another message",
        another_place_is_named,
        "is shown where it is not",
        ("answers_to_all",),
    ),
    "nothing is found": Mutant(
        "what was accepted is not there for who asks",
        nothing_is_found,
        "is reported not found",
        ("answers_to_all",),
    ),
    "a list of seconds counts one more": Mutant(
        "each second is said to hold a message that nobody sent",
        _counted(_count_one_more),
        "a list of seconds shows .*, of",
        ("answers_to_all",),
    ),
    "a list of seconds leaves out one": Mutant(
        "the last of them is not listed, and the list says that it is complete",
        _counted(_leave_out_a_second),
        "a list of seconds shows 0 of",
        ("answers_to_all",),
    ),
    "status is ahead of progress": Mutant(
        "what is to come is said to be done",
        _described(_tell_of_more_progress),
        "and none is committed",
        ("answers_to_all",),
    ),
    "status is behind progress": Mutant(
        "what was done long ago is said to be to come",
        _described(_tell_of_old_progress),
        "and more was committed before",
        ("answers_to_all",),
    ),
    "status knows no leader": Mutant(
        "nobody is said to lead, and somebody does",
        _described(_name_nobody),
        "status says that '' leads",
        ("answers_to_all",),
    ),
    "status counts copies": Mutant(
        "a message that two nodes hold is said to be two",
        _described(_count_copies),
        "status counts .* messages as pending, of",
        ("answers_to_all",),
    ),
    "status tells of nothing pending": Mutant(
        "what is to come is not counted",
        _described(_tell_of_nothing_pending),
        "status counts 0 of .* messages",
        ("answers_to_all",),
    ),
    "status tells of no bytes": Mutant(
        "what is to come is counted, and said to take nothing",
        _described(_tell_of_no_bytes),
        "status counts 0 of .* bytes",
        ("answers_to_all",),
    ),
    "a search leaves out one": Mutant(
        "what is pending is not listed, and the list says that it is complete",
        _searched(_leave_out_one),
        "leaves out",
        ("answers_to_all",),
    ),
    "a second leaves out one": Mutant(
        "what is in it is not listed, on the last page",
        _read(lambda found: found.messages.pop()),
        "a list of its second leaves out",
        ("answers_to_all",),
    ),
    "a second is shown as done": Mutant(
        "what is to come is listed as done",
        _read(_call_it_done),
        "is shown as DONE, and is not",
        ("answers_to_all",),
    ),
    "what a search finds is not cancelled": Mutant(
        "who cancels what has an id is told that it is done, and nothing is written",
        what_is_found_is_not_cancelled,
        "reported cancelled, and no row says so",
        ("answers_to_all",),
    ),
    "a search finds halves to cancel": Mutant(
        "halves are cancelled by whoever names their topic, and not they",
        searches_find_halves,
        "is a half, and cancelled with what a search has found",
        ("answers_to_all",),
    ),
    "a search shows what is not there": Mutant(
        "what nobody sent is listed",
        _searched(_show_another),
        "which nobody sent",
        ("answers_to_all",),
    ),
    "every commit is of what was rolled back": Mutant(
        "halves whose senders commit them are said to be cancelled, and nothing is written",
        every_half_is_rolled_back,
        "reported cancelled, and no row says so",
        ("halves_and_words",),
    ),
    "no commit looks for a cancel": Mutant(
        "who commits a half that somebody has cancelled is told that it is sent",
        no_commit_looks_for_a_cancel,
        "as its caller is told, after it was cancelled",
        ("answers_to_all",),
    ),
    "every commit is left to the check": Mutant(
        "groups are asked about halves whose senders have said in time that they are committed",
        every_commit_is_left,
        "to its check, and it is still to come",
        ("halves_and_words",),
    ),
}
