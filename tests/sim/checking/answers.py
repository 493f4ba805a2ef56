"""What must hold of the answers that callers hear, and of what nodes decide for them.

docs/SIMULATION.md has the table: each answer of each call, what is true of it, and the mutants that
answer it where it is not.

What disks have lost is excused. TOO_LATE and LEFT_TO_CHECK are judged by the latest clock of any
node, when a node answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from delaywheel.ingress import HalfAnswer
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import TOO_LATE_MS, CancelDecision
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.server.commit.own_halves import LEFT_TO_CHECK_MS
from sim.checking.book import Entry, Fate
from sim.checking.calm import is_calm
from sim.checking.letters import latest_clock_us
from sim.checking.truth import FrameName, Key
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS
from sim.nodes.clients import CANCEL_OUTCOMES, CommitAnswer

if TYPE_CHECKING:
    from sim.checking.checks import Checks
    from sim.nodes.clients import Change
    from sim.nodes.world import World

HEARD_US = 1_500 * US_PER_MS
"""By then each node that is heard has told the others of what it has accepted."""


class Began(NamedTuple):
    """What is known when a call begins.

    Attributes:
        latest_ms: the latest clock.
        cancelled: which of its messages are known to be cancelled.
    """

    latest_ms: int
    cancelled: frozenset[Key]


class Answers:
    """Judges the answers of one run.

    Attributes:
        cancelled_by: of messages that a caller knows to be cancelled, the rows by then.
        sealed: messages, cancels and commits that a wheel has refused as too late.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.cancelled_by: dict[Key, list[FrameName]] = {}
        self._told_cancelled_us: dict[Key, int] = {}
        self.sealed: set[Key] = set()

    # --- what a node decides

    def begins(self, keys: Iterable[Key]) -> Began:
        """Notes what is known when a call is made."""
        known = {
            key
            for key in keys
            if (entry := self._world.book.of(key)) is not None and self._is_known_cancelled(entry)
        }
        return Began(self._latest_ms(), frozenset(known))

    def decides(self, began: Began, key: Key, decision: Change) -> None:
        """Checks a decision when its node answers, whether or not that arrives."""
        is_finished = key.due_ms // 1000 < self._checks.floor
        if decision is not CancelDecision.TOO_LATE or is_finished:
            return
        entry = self._world.book.of(key)
        if key in began.cancelled:
            self._fail(f"{entry} is cancelled, and reported too late")
        if not self._is_past(began, key, TOO_LATE_MS):
            self._fail(f"{entry} is reported too late, and it is still to come")

    def leaves_to_check(self, began: Began, key: Key) -> None:
        """Checks a commit that is not written: it is too late for that."""
        if not self._is_past(began, key, LEFT_TO_CHECK_MS):
            entry = self._world.book.of(key)
            self._fail(f"{entry} is left to its check, and it is still to come")

    # --- what callers learn

    def cancel(self, entry: Entry, decision: Change, asked_us: int) -> None:
        """Checks the outcome of a cancel."""
        checks, cancels = self._checks, self._world.truth.cancels[entry.key]
        if decision is CancelDecision.CANCELLED:
            self._is_told_cancelled(entry)
            if not cancels:
                self._fail(f"{entry} is reported cancelled, and no row says so")
            if checks.deliveries(entry) and not self._world.truth.are_gone(cancels):
                self._fail(f"{entry} is reported cancelled after it was delivered")
            self._world.halves.cancelled(entry)
        elif decision is CancelDecision.ALREADY_DELIVERED:
            elsewhere = {"asked", "committed", "deferred"}
            is_elsewhere = not elsewhere.isdisjoint(checks.outcomes[entry.key])
            if not (checks.delivered[entry.key] or is_elsewhere or checks.is_excused(entry.key)):
                self._fail(f"{entry} is reported delivered and is not")
        elif decision is CancelDecision.NOT_FOUND and self._was_known(entry, asked_us):
            self._fail(f"{entry} is reported not found")
        elif decision is CancelDecision.RESCHEDULED and entry.key not in checks.rescheduled:
            self._fail(f"{entry} is reported to have another due, and nobody has decided that")

    def reschedule(self, entry: Entry, change: Change, to_ms: int | None, asked_us: int) -> None:
        """Checks the outcome of a reschedule, and the due that it names."""
        if change is CancelDecision.RESCHEDULED:
            dues_ms = self._checks.rescheduled.get(entry.key)
            # A due that it has already needs no decision.
            if dues_ms is None and to_ms != entry.due_ms:
                self._fail(f"{entry} is reported rescheduled, and nobody has decided that")
            elif dues_ms is not None and to_ms not in dues_ms:
                self._fail(f"{entry} is reported to be due {to_ms}, and was given {dues_ms}")
            if (
                dues_ms
                and self._checks.delivered[entry.key]
                and not self._checks.is_any_gone(entry)
            ):
                self._fail(f"{entry} is reported rescheduled after it was delivered")
        elif change is CancelDecision.CANCELLED:
            if not self._world.truth.cancels[entry.key]:
                self._fail(f"{entry} is reported cancelled, and no row says so")
        elif change is Reason.HALF_KEEPS_DUE:
            if not entry.is_half:
                self._fail(f"{entry} is said to be a half, and is none")
        elif isinstance(change, CancelDecision):
            self.cancel(entry, change, asked_us)

    def get(self, entry: Entry, answer: pb.StoredMessage | Reason, asked_us: int) -> None:
        """Checks what a node tells of a message."""
        # What is finished is deleted.
        is_absent = answer is Reason.MESSAGE_NOT_FOUND and entry.slot >= self._checks.floor
        if is_absent and self._was_known(entry, asked_us - HEARD_US):
            self._fail(f"{entry} is reported not found")
        if not isinstance(answer, Reason):
            self._shown(entry, answer, asked_us)
            was_told = self._world.halves.was_told(entry, asked_us - HEARD_US)
            if answer.state == pb.MESSAGE_STATE_ASKED and was_told and is_calm(self._world.plan):
                self._fail(f"{entry} is shown as ASKED, and its group has answered")

    def cancel_many(self, entry: Entry, found: pb.CancelManyResponse, asked_us: int) -> None:
        """Checks the outcomes of a cancel of what a search for an id has found."""
        for each in found.results:
            decision = CANCEL_OUTCOMES[each.outcome]
            is_it = (each.topic, each.due_ms) == (entry.topic, entry.due_ms)
            if is_it and decision is not CancelDecision.UNKNOWN:
                self.cancel(entry, decision, asked_us)
                if entry.is_half:
                    self._fail(f"{entry} is a half, and cancelled with what a search has found")

    def slot(self, slot: int, found: pb.GetSlotResponse, asked_us: int) -> None:
        """Checks what a node lists of a second, and what it leaves out."""
        keys = self._listed("a list", found.messages, asked_us)
        if found.next_page_token or slot < self._checks.floor or not is_calm(self._world.plan):
            return
        for entry in self._world.book.entries.values():
            is_of_it = entry.slot == slot and entry.key not in keys
            if is_of_it and self._was_known(entry, asked_us - HEARD_US):
                self._fail(f"a list of its second leaves out {entry}")

    def search(self, found: pb.SearchResponse, asked_us: int) -> None:
        """Checks what a node lists as pending, and what it leaves out."""
        book, keys = self._world.book, self._listed("a search", found.messages, asked_us)
        if found.looked.incomplete or found.next_page_token:
            return
        sure_us = latest_clock_us(self._world) + HEARD_US
        for entry in book.entries.values():
            is_pending = not (
                self._checks.is_ended(entry)
                or entry.cancel_tried
                or entry.reschedule_tried
                or entry.is_half
                or self._checks.is_any_gone(entry)
            )
            is_of_it = is_pending and (entry.due_ms - EPOCH_MS) * US_PER_MS > sure_us
            if is_of_it and entry.key not in keys and self._was_known(entry, asked_us - HEARD_US):
                self._fail(f"a search that has seen everything leaves out {entry}")

    def slots(self, found: pb.ListSlotsResponse, asked_us: int) -> None:
        """Checks how many messages a list of seconds shows in each, as any node has them."""
        truth, written = self._world.truth, self._written()
        shown = {row.slot: row.messages for row in found.slots}
        for slot, messages in shown.items():
            if messages > written[slot] and truth.is_all_read:
                self._fail(f"a list of seconds shows {messages} in {slot}, of {written[slot]}")
        if not is_calm(self._world.plan):
            return
        known = Counter(
            entry.slot
            for entry in self._world.book.entries.values()
            if self._was_known(entry, asked_us - HEARD_US)
        )
        for slot, messages in known.items():
            if slot >= self._checks.floor and shown.get(slot, 0) < messages:
                self._fail(f"a list of seconds shows {shown.get(slot, 0)} of {messages} in {slot}")

    def status(self, found: pb.DescribeClusterResponse, asked_us: int) -> None:
        """Checks who leads, and how far progress has come, as a node tells it."""
        committed, leaders = self._checks.progress_ms, self._checks.leaders
        before_us = asked_us - HEARD_US
        told_ms = found.progress.due_ms
        if told_ms > max((due_ms for _, due_ms in committed), default=0):
            self._fail(f"status tells of progress up to {told_ms}, and none is committed")
        if not is_calm(self._world.plan):
            return
        if told_ms < max((due_ms for at_us, due_ms in committed if at_us < before_us), default=0):
            self._fail(f"status tells of progress up to {told_ms}, and more was committed before")
        if leaders and leaders[-1][0] < before_us and found.leader.node != leaders[-1][1]:
            self._fail(f"status says that {found.leader.node!r} leads, and {leaders[-1][1]} does")
        done_ms = max((due_ms for at_us, due_ms in committed if at_us < before_us), default=0)
        self._pending(found.pending, min(done_ms, EPOCH_MS + asked_us // US_PER_MS), asked_us)

    def _pending(self, told: pb.Pending, done_ms: int, asked_us: int) -> None:
        """Checks how much is pending, as told in a calm cluster; all up to `done_ms` is not."""
        written = self._written()
        most = sum(messages for slot, messages in written.items() if slot >= done_ms // 1000)
        if told.messages > most and self._world.truth.is_all_read:
            self._fail(f"status counts {told.messages} messages as pending, of {most}")
        entries = self._world.book.entries.values()
        changed = {
            entry.slot
            for entry in entries
            if entry.cancel_tried or entry.reschedule_tried or entry.committed is not None
        }
        sure_us = latest_clock_us(self._world) + HEARD_US
        pending = [
            entry
            for entry in entries
            if entry.slot not in changed
            and (entry.slot * 1_000 - EPOCH_MS) * US_PER_MS > sure_us
            and self._was_known(entry, asked_us - HEARD_US)
        ]
        length_bytes = sum(len(entry.value or b"") for entry in pending)
        if not told.at_least and told.messages < len(pending):
            self._fail(f"status counts {told.messages} of {len(pending)} messages as pending")
        if not told.at_least and told.length_bytes < length_bytes:
            self._fail(f"status counts {told.length_bytes} of {length_bytes} bytes as pending")

    def _written(self) -> Counter[int]:
        """Returns how many messages of each second lie anywhere, each wheel's by itself."""
        for node in self._world.living():
            self._checks.looked(node)  # a group that is not answered yet is shown, too
        written = Counter[int]()
        for key, copies in self._world.truth.copies.items():
            written[key.due_ms // 1000] += len(copies)
        return written

    def commit(self, entry: Entry, answer: CommitAnswer, asked_us: int) -> None:
        """Checks the outcome of a commit."""
        if answer is CommitAnswer.ROLLED_BACK:
            self.cancel(entry, CancelDecision.CANCELLED, asked_us)
        elif answer is CommitAnswer.COMMITTED:
            if not self._world.truth.commits[entry.key]:
                self._fail(f"{entry} is committed, as its caller is told, and no row says so")
            told_us = self._told_cancelled_us.get(entry.key, asked_us)
            if told_us < asked_us - HEARD_US and is_calm(self._world.plan):
                self._fail(f"{entry} is committed, as its caller is told, after it was cancelled")

    # --- inside

    def _listed(self, what: str, found: Iterable[pb.StoredMessage], asked_us: int) -> set[Key]:
        """Checks messages that a node lists; returns which these are."""
        keys = set[Key]()
        for message in found:
            key = MessageKey(message.id, message.due_ms, message.topic)
            keys.add(key)
            if self._world.ingress.is_known(key):
                continue
            entry = self._world.book.of(key)
            if entry is None:
                self._fail(f"{what} shows {key}, which nobody sent")
            else:
                is_asked = message.state == pb.MESSAGE_STATE_ASKED
                if is_asked and self._world.halves.could_not_be_asked(entry):
                    continue  # as its rows say: lists look for no letter
                # A copy waits until a leader has seen that it is one.
                accepted_us = (message.accepted_at_ms - EPOCH_MS) * US_PER_MS
                self._shown(entry, message, asked_us, accepted_us)
        return keys

    def _shown(
        self, entry: Entry, shown: pb.StoredMessage, asked_us: int, accepted_us: int = 0
    ) -> None:
        name = pb.MessageState.Name(shown.state).removeprefix("MESSAGE_STATE_")
        if not self._is_true(entry, shown, asked_us, accepted_us):
            self._fail(f"{entry} is shown as {name}, and is not")
        if shown.HasField("place") and not self._is_at(entry, shown.place):
            self._fail(f"{entry} is shown where it is not: {shown.place}")
        is_cancelled = name in {"CANCELLED", "ROLLED_BACK"} and self._world.truth.cancels[entry.key]
        if is_cancelled and entry.key not in self._checks.rescheduled:
            self._is_told_cancelled(entry)

    def _is_told_cancelled(self, entry: Entry) -> None:
        """Notes that a caller knows it: from now on no other end is true."""
        entry.cancelled = True
        self._told_cancelled_us.setdefault(entry.key, self._world.scheduler.now_us)
        self.cancelled_by[entry.key] = list(self._world.truth.cancels[entry.key])

    def _is_true(
        self, entry: Entry, shown: pb.StoredMessage, asked_us: int, accepted_us: int
    ) -> bool:
        """Whether a message may be in the state that a node shows."""
        checks, truth, key = self._checks, self._world.truth, entry.key
        halves = self._world.halves
        is_excused, delivered = checks.is_excused(key), bool(checks.delivered[key])
        match shown.state:
            case pb.MESSAGE_STATE_CANCELLED | pb.MESSAGE_STATE_ROLLED_BACK:
                rows = truth.cancels[key]
                is_named = bool(rows) or key in checks.rescheduled
                if shown.state == pb.MESSAGE_STATE_ROLLED_BACK:
                    is_named |= halves.has_answered(entry, HalfAnswer.ROLLED_BACK)
                return is_named and (not delivered or truth.are_gone(rows))
            case pb.MESSAGE_STATE_DELIVERED | pb.MESSAGE_STATE_DEAD_LETTERED:
                return delivered or is_excused
            case pb.MESSAGE_STATE_DONE:
                return checks.is_ended(entry) or is_excused
            case pb.MESSAGE_STATE_COMMITTED | pb.MESSAGE_STATE_UNDECIDED:
                is_committed = shown.state == pb.MESSAGE_STATE_COMMITTED
                answer = HalfAnswer.COMMITTED if is_committed else HalfAnswer.UNDECIDED
                is_by_row = is_committed and (bool(truth.commits[key]) or is_excused)
                return is_by_row or halves.has_answered(entry, answer)
            case pb.MESSAGE_STATE_ASKED:
                return halves.was_asked(entry) or is_excused
        is_half = shown.state == pb.MESSAGE_STATE_HELD
        is_delivered = 0 <= entry.visible_us < asked_us - HEARD_US
        is_old = is_delivered and accepted_us < asked_us - HEARD_US and is_calm(self._world.plan)
        return is_half == entry.is_half and not is_old

    def _is_at(self, entry: Entry, place: pb.KafkaPlace) -> bool:
        """Whether a record is that of a message: it names the message, or its key is the id."""
        (partition,) = (
            each
            for each in self._world.kafka.partitions(place.topic)
            if each.number == place.partition
        )
        record = partition.log[place.offset]
        named = dict(record.headers).get("dw-id") or (record.key or b"").hex().encode()
        return record.visible_us >= 0 and named == entry.key.id.hex().encode()

    @property
    def _checks(self) -> Checks:
        return self._world.checks

    def _is_past(self, began: Began, key: Key, margin_ms: int) -> bool:
        """Whether it is due, or nearly, by a node's clock; or a wheel has refused it as that."""
        latest_ms = max(began.latest_ms, self._latest_ms())
        return key.due_ms <= latest_ms + margin_ms or key in self.sealed

    def _latest_ms(self) -> int:
        return max(node.clock.wall_ms() for node in self._world.nodes.values())

    def _is_known_cancelled(self, entry: Entry) -> bool:
        """Whether nodes can say that it was cancelled: below the floor none knows any more."""
        checks = self._checks
        was_cancelled = "cancelled" in checks.outcomes[entry.key]
        return was_cancelled and entry.slot >= checks.floor and not checks.is_any_gone(entry)

    def _was_known(self, entry: Entry, asked_us: int) -> bool:
        """Whether the message was acknowledged before anyone asked, and was not lost."""
        return (
            entry.fate is Fate.ACKNOWLEDGED
            and entry.acknowledged_us < asked_us
            and not self._checks.is_excused(entry.key)
        )

    def _fail(self, what: str) -> None:
        self._world.violation(what)
