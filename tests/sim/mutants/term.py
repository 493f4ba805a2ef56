"""Errors in candidacies, in the meaning of reports, and in what a leader writes beside messages."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

from delaywheel_replica.cleaner.candidacy import Candidacy
from delaywheel_replica.cleaner.kafka.follower import ControlFollower
from delaywheel_replica.cleaner.leadership import Leadership
from delaywheel_replica.cleaner.outside.ports import IDS
from delaywheel_replica.cleaner.server_row import ServerRow
from delaywheel_replica.core.election.events import Effect
from delaywheel_replica.core.election.machine import MAX_SILENCE_MS, Election
from delaywheel_replica.core.election.repeating import MOST_BACKOFF_MS, EndTimes
from delaywheel_replica.core.leader import registration
from delaywheel_replica.core.member.own_heartbeat import OwnHeartbeat
from delaywheel_replica.core.node.shared_state import Known
from delaywheel_replica.core.protocol.control import ControlState, Leader, LeaderRecord
from delaywheel_replica.core.protocol.transaction_outcomes import (
    ACTIONS,
    VERDICTS,
    Action,
    Call,
    LibraryAnswer,
    TransactionState,
)
from sim.mutants.mutant import Mutant, Patch, everywhere, instead, row


def marks_one_id() -> list[Patch]:
    mark_with = Election._mark_with

    def mark_once(self: Election, first: int) -> list[Effect]:
        return mark_with(self, self._config.ids if first else 0)

    def leader(self: ControlState, _ids: int, **_: object) -> Leader | None:
        mark = self.leaders.get(0)
        return None if mark is None else Leader(mark.node, mark.offset)

    return [instead(Election, "_mark_with", mark_once), instead(ControlState, "leader", leader)]


def goes_on_without_reading() -> list[Patch]:
    real = Candidacy._read_marks
    read: WeakKeyDictionary[Candidacy, ControlState] = WeakKeyDictionary()

    def read_once(self: Candidacy) -> ControlState:
        if self not in read:
            read[self] = real(self)
        mark = LeaderRecord(self._node, self._follower._token, 0)
        return replace(read[self], leaders=dict.fromkeys(range(IDS), mark))

    return [instead(Candidacy, "_read_marks", read_once)]


def repeated_commit_is_known() -> list[Patch]:
    return [row(VERDICTS, (Call.COMMIT, LibraryAnswer.OK_RETRIED), TransactionState.COMMITTED)]


def abandons_nothing() -> list[Patch]:
    return [
        row(VERDICTS, (Call.FLUSH, LibraryAnswer.TIMED_OUT), TransactionState.UNKNOWN),
        row(VERDICTS, (Call.COMMIT, LibraryAnswer.OK_RETRIED), TransactionState.UNKNOWN),
    ]


def sends_nothing_again() -> list[Patch]:
    return [instead(EndTimes, "backoff_ms", property(lambda _self: MOST_BACKOFF_MS))]


def doubts_every_end() -> list[Patch]:
    return [row(VERDICTS, (Call.COMMIT, LibraryAnswer.OK), TransactionState.COMMITTED_LOOSE)]


def goes_on_after_an_unknown_outcome() -> list[Patch]:
    patient = property(lambda _self: MAX_SILENCE_MS)
    return [
        row(ACTIONS, TransactionState.UNKNOWN, Action.GO_ON),
        # Else its last commit is too old by then, and others report what it does not know.
        instead(Election, "_patience_ms", patient),
        *compares_no_progress(),
    ]


def numbers_start_again() -> list[Patch]:
    real = registration.register

    def register(state: ControlState, node: str, storage: str, last: int, **rest: object) -> object:
        forgotten = {name: known for name, known in state.nodes.items() if name != node}
        return real(replace(state, nodes=forgotten), node, storage, last, **rest)  # type: ignore[arg-type]

    return [everywhere(real, register)]


def reads_on_after_a_term() -> list[Patch]:
    leave_term = Leadership._leave_term

    def leave(self: Leadership) -> None:
        with instead(ControlFollower, "restart", lambda _self: None):
            leave_term(self)

    return [
        instead(ControlFollower, "pause", lambda _self: None),
        instead(Leadership, "_leave_term", leave),
        *never_too_far_behind(),
    ]


def never_too_far_behind() -> list[Patch]:
    return [instead(ControlFollower, "_is_behind", lambda _self: False)]


def is_not_heard_while_it_commits() -> list[Patch]:
    return [instead(Election, "waits_until_ms", property(lambda _self: -1))]


def learns_nothing_from_its_marks() -> list[Patch]:
    return [instead(Election, "_patience_ms", property(lambda self: self._silence_ms))]


def is_not_heard_while_it_stands() -> list[Patch]:
    return [instead(Known, "stands", property(lambda _self: False))]


def compares_no_clock_with_kafkas() -> list[Patch]:
    return [instead(Candidacy, "_found_clock", lambda _self: None)]


def believes_old_rows() -> list[Patch]:
    return [instead(ServerRow, "read", lambda self: self._row.read())]


def compares_no_progress() -> list[Patch]:
    heartbeat = OwnHeartbeat.heartbeat
    return [instead(OwnHeartbeat, "heartbeat", lambda self: replace(heartbeat(self), reached=None))]


TERM = {
    "compares no progress": Mutant(
        "a control topic that has lost less than the floor's last move is led on",
        compares_no_progress,
        "goes back|delivered twice",
        ("lost_end",),
    ),
    "compares no clock with Kafka's": Mutant(
        "a node alone leads by whatever its clock shows",
        compares_no_clock_with_kafkas,
        "early by its clock|not drained",
        ("clock_wrong_at_a_restart",),
    ),
    "believes the row of an earlier server": Mutant(
        "the cleaner takes a dead server's status, or a dead machine's, for its own server's",
        believes_old_rows,
        "while its server starts",
        ("slow_starts",),
    ),
    "is not heard while it commits": Mutant(
        "nobody stamps a leader's row while its main thread waits for Kafka",
        is_not_heard_while_it_commits,
        "candidacies",
        ("slow_ends",),
    ),
    "learns nothing from its marks": Mutant(
        "a leader on slow brokers waits no longer than any",
        learns_nothing_from_its_marks,
        "candidacies",
        ("slow_ends",),
    ),
    "doubts every end": Mutant(
        "each transaction costs an id that is inited again, and nothing was slow",
        doubts_every_end,
        "inits within a term, and no end was in doubt",
        ("calm",),
    ),
    "is not heard while it stands": Mutant(
        "nobody waits for a candidate that waits for slow brokers",
        is_not_heard_while_it_stands,
        "candidacies",
        ("slow_ends",),
    ),
    "reads on after a term": Mutant(
        "a leader goes on reading the control topic where it was when its term began",
        reads_on_after_a_term,
        "comes back|(is|was) not registered",
        ("after_a_term",),
    ),
    "reads on however long it was cut off": Mutant(
        "a standby goes on reading the control topic, whatever was removed and forgotten meanwhile",
        never_too_far_behind,
        "comes back|(is|was) not registered",
        ("long_cut_off",),
    ),
    "a leader record on one id only": Mutant(
        "a candidate commits its mark with the first id, and looks at that one",
        marks_one_id,
        "elected is",
        ("candidates",),
    ),
    "goes on without looking who led": Mutant(
        "whoever has inited the ids again goes on from what it read before",
        goes_on_without_reading,
        "no node leads",  # nothing is sent: heartbeats say that more was read
        ("corrected_alone",),
    ),
    "a repeated commit is known": Mutant(
        "a commit that the library sent twice counts as a success like any other",
        repeated_commit_is_known,
        "without its progress",
        ("repeated_ends",),
    ),
    "sends nothing again": Mutant(
        "a request that meets a leader's move is not sent again within its call",
        sends_nothing_again,
        "candidacies|no node leads",
        ("moving_leaders",),
    ),
    "a slow commit ends the term": Mutant(
        "nothing is gone on with after an end that may have been sent twice",
        abandons_nothing,
        "candidacies",
        ("moving_leaders",),
    ),
    "goes on after an unknown outcome": Mutant(
        "a leader that does not know how its commit ended begins the next transaction",
        goes_on_after_an_unknown_outcome,
        "delivered twice|goes back",
        ("unanswered_ends",),
    ),
    "numbers start again": Mutant(
        "a node is given its next number by what it says of itself, not by what was given before",
        numbers_start_again,
        "opened before|not drained",
        ("wipes",),
    ),
}
