"""Invariants of ingress records, each checked as early as possible.

| | invariant | checked at |
|---|---|---|
| 1 | each committed record has one end: delivered, dead letter, cancelled | each commit; at the end |
| 2 | it is delivered at its own due, with the same bytes | each commit |
| 3 | the offset passes a record once it has its end, or W members hold it | each control record |
| 4 | a dead letter gives the true reason | each commit |
| 5 | uncommitted records have no effect | each commit and control record |
| 6 | nothing is left to read, and the group shows it | at the end |
| 7 | no leader forgets where a partition was cut off, and later records there are not read | each commit and control record |

Early deliveries, and the fates of messages in wheels, are checked for all messages
(checks.py).
"""  # noqa: E501 - rows of a table

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from delaywheel import ingress
from delaywheel.record_headers import FIRST_DEFERRED, FIRST_DUE, OF_DEFERRAL
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import UnfitReason
from delaywheel_replica.core.ingress.term import Handed
from delaywheel_replica.core.protocol.control import ControlState, IngressPartition, IngressRecord
from delaywheel_replica.core.protocol.reschedules import MessageKey
from sim.checking.calm import is_calm
from sim.checking.ingress_book import CUT_OFF, NUMBER, IngressBook, Sent
from sim.checking.letters import has_expired_long_ago, was_unavailable, wrong_letter
from sim.checking.moments import Moment
from sim.checking.truth import FrameName, Key, key_in
from sim.machine.clocks import EPOCH_MS, true_wall_ms
from sim.machine.scheduler import US_PER_MS

if TYPE_CHECKING:
    from sim.checking.book import Entry
    from sim.kafka.log import Entry as LogEntry
    from sim.kafka.log import Partition, Transaction
    from sim.nodes.world import World

OWN_HEADERS = frozenset({"dw-id", "dw-due", "dw-accepted", "dw-wheel", "dw-forwarded"})
DIRECT = b"sim/ingress"
"""Replaces the wheel in records of messages that were in no wheel."""

ORIGIN = "dw-dead-origin"
REASON = "dw-dead-reason"

READY_US = 4_000 * US_PER_MS
"""A leader is in office by then, if the cluster is undisturbed."""

LATE_US = 1_000 * US_PER_MS
"""No message is later in that case, and no cancel takes longer."""

LATE_MS = 12_000
"""A leader whose clock is further ahead than this does not lead for long (`checks.EARLY_MS`)."""


DELETED = "deleted"
"""An excuse: retention was faster than the leader."""

RECREATED = "of a topic that was recreated"


class IngressChecks:
    """Watches the records of one run.

    Attributes:
        book: the records that were sent.
        committed: for each partition, what the latest decided transaction says.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.book = IngressBook()
        self.committed: dict[IngressPartition, IngressRecord] = {}
        self._delivered: Counter[int] = Counter()
        self._from_wheels: Counter[Key] = Counter()
        self._letters: Counter[int] = Counter()
        self._deferred: Counter[int] = Counter()
        self._announced: defaultdict[IngressPartition, SeqSet] = defaultdict(lambda: NO_SEQS)
        self._withdrawn: set[Key] = set()
        self._lost: defaultdict[IngressPartition, list[range]] = defaultdict(list)
        # By the topic's id: where it was found to end too early, and when that was committed.
        self._cut_off: dict[tuple[str, IngressPartition], tuple[int, int]] = {}

    # --- what brokers do

    def excuses(self, topic_id: str, partition: Partition, offsets: range, why: str) -> None:
        """Notes that the brokers no longer have these records, read or unread."""
        for offset in offsets:
            place = IngressPlace(partition.topic, partition.number, offset)
            sent = self.book.by_place.get((topic_id, place))
            if sent is not None and sent.settled_us < 0:
                sent.excuse = why if why == RECREATED else sent.excuse or why

    # --- what a leader does

    def hands(self, records: Sequence[Handed]) -> None:
        """Checks records that are handed to a server: their announcement is committed."""
        for at, taken in records:
            if taken.offset not in self._announced[at]:
                self._fail(f"{at}/{taken.offset} is handed over, and was not announced")

    # --- what is committed

    def decided(self, transaction: Transaction) -> None:
        """Checks offsets once all of a committed transaction was checked."""
        for entry in transaction.entries:
            if (entry.key or b"").startswith(b"ingress/") and entry.topic == self._control:
                for at, record in ControlState().apply(entry.key, entry.value, 0).ingress.items():
                    self._moves(at, record, transaction.node)

    def deliver(self, entry: LogEntry) -> bool:
        """Checks a delivered message; returns whether it was an ingress record."""
        sent = self._sent(entry)
        if sent is None:
            return False
        self._trace("delivers", sent)
        self._counts(sent)
        self._delivered[sent.number] += 1
        passed, own = entry.headers[: len(sent.passed)], entry.headers[len(sent.passed) :]
        ours = {name: value or b"" for name, value in own}
        if not ours.keys() <= OWN_HEADERS or len(ours) != len(own):
            self._fail(f"{sent} is delivered with headers {entry.headers}")
            return True
        self._check_content(sent, entry, passed)
        key = key_in(ours, entry.topic)
        if key != sent.message:
            self._fail(f"{sent} is delivered as {key}, not {sent.message}")
        if not sent.is_delayed and not self._may_be_delivered(sent):
            self._fail(f"{sent} is delivered, and is no message")
        if has_expired_long_ago(sent, self._world.scheduler.now_us):
            self._fail(f"{sent} is delivered, and has expired")
        if ours["dw-wheel"] != DIRECT:
            self._from_wheels[key] += 1
            self._check_withdrawn(sent)
        self._check_time(sent)
        is_excused = self._any_gone(key)
        if self._ends(sent) > 1 and not is_excused:
            self._fail(f"{sent} is delivered twice")
        if self._from_wheels[key] > 1 and not is_excused:
            self._fail(f"{sent} comes out of a wheel twice")
        return True

    def check_is_read(self, entry: LogEntry) -> None:
        """Checks that a leader sends nothing where it, or one before it, reads no further."""
        at = entry.topic, entry.partition
        known = self._cut_off.get((self._world.kafka.topic_id(entry.topic), at))
        if known is not None and known[1] < self._world.scheduler.now_us:
            self._fail(f"a leader sends {entry.headers} to {at}, which is no longer read")

    def defers(self, entry: LogEntry, key: Key, message: Entry | None) -> None:
        """Checks a message that a leader sends to the ingress topic, as its topic takes nothing.

        Args:
            entry: The record.
            key: The message.
            message: The message; None: it was a record of the ingress topic itself.
        """
        ours = dict(entry.headers)
        topic, first_ms = (ours[ingress.TOPIC] or b"").decode(), int(ours[FIRST_DUE] or 0)
        since_ms = int(ours[FIRST_DEFERRED] or 0)
        before = next(iter(self.book.by_message.get(key, ())), None)
        if message is not None:
            was = message.topic, message.record_key, message.value, message.headers, message.due_ms
        elif before is not None:
            self._trace("defers", before)
            self._counts(before)
            self._deferred[before.number] += 1
            if self._ends(before) > 1 and not self._any_gone(key):
                self._fail(f"{before} has an end, and is deferred")
            own = [each for each in before.passed if each[0] not in OF_DEFERRAL]
            was = before.topic, before.key, before.value, own, before.first_due_ms
        else:
            self._fail(f"what nobody sent is deferred: {entry.headers}")
            return
        passed = entry.headers[: len(was[3])]
        if (topic, entry.key, entry.value, passed, first_ms) != was:
            self._fail(f"{was} is deferred with other contents: {entry.headers}")
        if not was_unavailable(self._world, topic, entry.key):
            self._fail(f"{was} is deferred, and its topic is well")
        patience_ms = self._world.plan.settings.patience_s * 1000
        if since_ms != ((before and before.first_deferred_ms) or since_ms):
            self._fail(f"{was} is deferred as if for the first time: {entry.headers}")
        if true_wall_ms(self._world.scheduler) > since_ms + patience_ms + LATE_MS:
            self._fail(f"{was} is deferred after its patience has ended")
        place = IngressPlace(entry.topic, entry.partition, entry.offset)
        asked = entry.headers[len(passed) :]
        sent = self.book.answer(
            Record(entry.topic, entry.key, entry.value, asked),
            self._world.kafka.topic_id(entry.topic),
            place,
            [*passed, (FIRST_DUE, b"%d" % first_ms), (FIRST_DEFERRED, b"%d" % since_ms)],
            self._world.scheduler.now_us,
        )
        sent.is_committed, sent.ttl_header = True, self._world.book.ttl_header

    def dead(self, entry: LogEntry) -> bool:
        """Checks a dead letter; returns whether it was an ingress record."""
        ours = {name: (value or b"").decode(errors="replace") for name, value in entry.headers}
        sent = self._sent(entry) or self._at(ours.get(ORIGIN, ""))
        if sent is None:
            return False
        self._trace(f"dead letter {ours.get(REASON)} of", sent)
        self._counts(sent)
        self._letters[sent.number] += 1
        if self._ends(sent) > 1 and not self._any_gone(sent.message):
            self._fail(f"{sent} is delivered twice, as a dead letter")
        if ORIGIN in ours and (entry.key, entry.value) != (sent.key, sent.value):
            self._fail(f"{sent} is a dead letter with other bytes")
        wrong = self._wrong_letter(sent, ours, entry)
        if wrong is not None:
            self._fail(f"{sent}: {wrong}")
        return True

    def outcome(self, report: Mapping[str, Any]) -> bool:
        """Checks the outcome of an undelivered message; returns whether it is an ingress record."""
        if report["outcome"].startswith("ingress-"):
            self._ingress_outcome(report)
            return True
        key = MessageKey(bytes.fromhex(report["id"]), report["due_ms"], report["topic"])
        senders = self.book.by_message.get(key)
        if senders is None:
            return False
        self._trace(f"reports {report['outcome']}", senders[0])
        if report["outcome"] == "cancelled":
            self._withdrawn.add(key)
            if not any(sent.is_committed for sent in self.book.cancels[key]):
                self._fail(f"{senders[0]} counts as cancelled, and nobody asked for it")
        return True

    def is_known(self, key: Key) -> bool:
        """Whether this is the message, or the cancel, of a record."""
        return key in self.book.by_message or key in self.book.cancels

    def is_done(self, key: Key) -> bool:
        """Whether a message was delivered out of its wheel."""
        if key in self._withdrawn or self._from_wheels[key]:
            return True
        return any(
            self._letters[sent.number] or self._deferred[sent.number]
            for sent in self.book.by_message[key]
        )

    def _ingress_outcome(self, report: Mapping[str, Any]) -> None:
        """Checks an outcome of records that are in no wheel."""
        self._world.trace.add("kafka", "reports", str(dict(report)))
        match report["outcome"]:
            case "ingress-dead-lettered":
                sent = self._at(report["origin"])
                if sent is None or not self._letters[sent.number]:
                    self._fail(f"{sent or report} is reported as a dead letter, and is none")
            case "ingress-deferred":
                sent = self._at(report["origin"])
                if sent is None or not self._deferred[sent.number]:
                    self._fail(f"{sent or report} is said to be deferred, and is not")
            case "ingress-deleted":
                offsets = range(report["first_offset"], report["last_offset"] + 1)
                self._reported_lost((report["topic"], report["partition"]), offsets, DELETED)
            case "ingress-cut-off":
                offsets = range(report["first_offset"], report["last_offset"] + 1)
                self._reported_lost((report["topic"], report["partition"]), offsets, CUT_OFF)
            case "ingress-abandoned":
                if self._world.kafka.topic_id(report["topic"]) == report["topic_id"]:
                    self._fail(f"{report}, and the topic is the same")
            case other:
                self._fail(f"an outcome that nobody knows: {other}")

    def _is_reported(self, sent: Sent) -> bool:
        """Whether the fate of a record that Kafka has deleted is known."""
        assert sent.place is not None
        topic, partition, offset = sent.place
        is_lost = any(offset in offsets for offsets in self._lost[topic, partition])
        return is_lost or sent.settled_us >= 0 or self.is_done(sent.message)

    def _reported_lost(self, at: IngressPartition, offsets: range, why: str) -> None:
        """Checks records that are reported lost: the brokers no longer have them."""
        self._lost[at].append(offsets)
        topic_id = self._world.kafka.topic_id(at[0])
        for offset in offsets:
            sent = self.book.by_place.get((topic_id, IngressPlace(*at, offset)))
            if sent is None or not sent.is_committed or sent.excuse == why:
                continue
            # What was excused for another reason may have been deleted since.
            if not (why == DELETED and self._is_deleted(at, offset)):
                self._fail(f"{sent} is reported as {why}, and is there")

    def _is_deleted(self, at: IngressPartition, offset: int) -> bool:
        topic, number = at
        return any(
            each.number == number and offset < each.first
            for each in self._world.kafka.partitions(topic)
        )

    # --- when everything has drained

    @property
    def delivered(self) -> int:
        """The number of messages that became visible."""
        return self._delivered.total()

    def left(self) -> Iterator[str]:
        """Yields what has still to be done."""
        left = [sent for sent in self.book.committed() if not self._has_ended(sent)]
        if left:
            yield f"{len(left)} ingress records are pending, the first {left[0]}"
        names, kafka = self._world.names, self._world.kafka
        for partition in kafka.partitions(names.ingress):
            at = partition.topic, partition.number
            if at in self.book.cut_off:
                continue
            record = self.committed.get(at)
            done = 0 if record is None else record.next_offset
            shown = kafka.group_offset(names.ingress_group, *at)
            if done != partition.last_stable_offset:
                yield f"{at} is settled up to {done} of {partition.last_stable_offset}"
            elif record is not None and shown != done:
                yield f"the group shows {shown} of {done} at {at}"

    def check_at_the_end(self) -> None:
        """Checks that each record has its end, and that losses were reported."""
        for sent in self.book.committed():
            if not self._has_ended(sent):
                self._fail(f"{sent} has no end")
            if sent.excuse == DELETED and not self._ends(sent) and not self._is_reported(sent):
                self._fail(f"{sent} was deleted, and that was never reported")

    # --- inside

    @property
    def _control(self) -> str:
        return self._world.names.control

    def _sent(self, entry: LogEntry) -> Sent | None:
        headers = dict(entry.headers)
        number = headers.get(NUMBER)
        if number is not None and FIRST_DUE not in headers:
            return self.book.by_number.get(int(number))
        if not (headers.get("dw-id") and headers.get("dw-due")):
            return None
        found = self.book.by_message.get(key_in(headers, entry.topic))
        return found[-1] if found else None

    def _at(self, origin: str) -> Sent | None:
        """The latest record at this place."""
        found = [sent for (_, place), sent in self.book.by_place.items() if str(place) == origin]
        return found[-1] if found else None

    def _counts(self, sent: Sent) -> None:
        if not sent.is_committed:
            self._fail(f"{sent} has an end, and its transaction is {_word(sent.is_committed)}")
        if self._is_behind_the_end(sent):
            self._fail(f"{sent} was read, and its partition was known to end before it")

    def _is_behind_the_end(self, sent: Sent) -> bool:
        """Whether it came at an offset from which on no record may be read any more."""
        assert sent.place is not None
        topic, partition, offset = sent.place
        known = (self._world.kafka.topic_id(topic), (topic, partition))
        end, known_us = self._cut_off.get(known, (offset + 1, 0))
        is_of_this_topic = self.book.by_place.get((known[0], sent.place)) is sent
        return is_of_this_topic and offset >= end and sent.sent_us > known_us

    def _check_content(self, sent: Sent, entry: LogEntry, passed: object) -> None:
        content = entry.topic, entry.key, entry.value, passed
        if content != (sent.topic, sent.key, sent.value, sent.passed):
            self._fail(f"{sent} is delivered with other bytes: {content}")
        if sent.asked.partition not in (None, entry.partition):
            self._fail(f"{sent} is delivered to partition {entry.partition}")
        if sent.asked.timestamp_ms not in (None, entry.timestamp_ms):
            self._fail(f"{sent} is delivered with timestamp {entry.timestamp_ms}")

    def _check_time(self, sent: Sent) -> None:
        """Checks that nothing is late while the cluster is undisturbed."""
        if not is_calm(self._world.plan) or sent.place is None or sent.due_ms is None:
            return
        topic, partition, offset = sent.place
        seen_us = self._world.kafka.partitions(topic)[partition].log[offset].visible_us
        late_us = self._world.scheduler.now_us - max(
            seen_us, (sent.due_ms - EPOCH_MS) * US_PER_MS, READY_US
        )
        if late_us > LATE_US:
            self._fail(f"{sent} is delivered {late_us // US_PER_MS} ms after its due")

    def _check_withdrawn(self, sent: Sent) -> None:
        """Whether a waiting message is cancelled in good time there."""
        settled_us = [each.settled_us for each in self.book.cancels[sent.message]]
        first_us = min((us for us in settled_us if us >= 0), default=None)
        if first_us is None or sent.due_ms is None or not is_calm(self._world.plan):
            return
        lead_us = (sent.due_ms - EPOCH_MS) * US_PER_MS - first_us
        if lead_us > LATE_US:
            self._fail(f"{sent} is delivered, and was withdrawn {lead_us // US_PER_MS} ms before")

    def _may_be_delivered(self, sent: Sent) -> bool:
        """A record beyond the span may be within it by the time that it is read."""
        return sent.asked.reason is UnfitReason.DUE_BEYOND_SPAN

    def _wrong_letter(self, sent: Sent, ours: Mapping[str, str], entry: LogEntry) -> str | None:
        reason = ours[REASON]
        if sent.asked.reason is not None:
            return None if reason == sent.asked.reason else f"it is said to be {reason}"
        if sent.asked.withdraws:
            is_late = (sent.due_ms or 0) < true_wall_ms(self._world.scheduler) + LATE_MS
            return None if reason == UnfitReason.DUE_TOO_OLD and is_late else f"a letter: {reason}"
        if reason in UnfitReason.__members__:
            return f"a dead letter, and nothing is wrong with it: {reason} {ours}"
        return wrong_letter(self._world, sent, entry)

    def _ends(self, sent: Sent) -> int:
        ends = self._delivered, self._letters, self._deferred
        return sum(counted[sent.number] for counted in ends)

    def _has_ended(self, sent: Sent) -> bool:
        if self._ends(sent) or sent.excuse is not None:
            return True
        if not sent.is_delayed:
            return sent.asked.withdraws and sent.settled_us >= 0
        return self.is_done(sent.message) or self._is_gone(sent.message)

    def _moves(self, at: IngressPartition, after: IngressRecord, node: str) -> None:
        before, moments = self.committed.get(at), self._world.moments
        if after.announced - self._announced[at]:
            moments.happened(Moment.ANNOUNCED, node)
        if before is not None and after.next_offset > before.next_offset:
            moments.happened(Moment.SETTLED, node)
        self.committed[at] = after
        self._announced[at] |= after.announced
        if after.cut_off is not None:
            cut_off = after.cut_off, self._world.scheduler.now_us
            self._cut_off.setdefault((after.topic_id, at), cut_off)
        begin = before.next_offset if before is not None else 0
        if before is not None and before.topic_id != after.topic_id:
            begin = 0
        if after.next_offset < begin:
            self._fail(f"{at} goes back from {begin} to {after.next_offset}")
        if self._world.kafka.topic_id(at[0]) != after.topic_id:
            return  # of a recreated topic: which record was read is unknown
        for offset in range(begin, after.next_offset):
            sent = self.book.by_place.get((after.topic_id, IngressPlace(*at, offset)))
            if sent is not None:
                self._settles(sent)

    def _settles(self, sent: Sent) -> None:
        """Checks that a passed record has its end in this transaction, or is held."""
        if sent.excuse == CUT_OFF:
            return  # it may be another record than the one announced under this offset
        if sent.is_committed is None:
            self._fail(f"{sent} is passed, and its transaction is open")
        if sent.is_committed:
            is_well = bool(self._ends(sent)) or self._is_held(sent)
            if not is_well and sent.excuse is None:
                self._fail(f"{sent} is passed: it has no end, and W members do not hold it")
            if is_well or sent.excuse is None:
                sent.settled_us = self._world.scheduler.now_us

    def _is_held(self, sent: Sent) -> bool:
        return any(
            self._world.checks.is_acknowledged(name) or self._world.truth.frames[name].gone
            for name in self._frames(sent)
        )

    def _frames(self, sent: Sent) -> list[FrameName]:
        truth = self._world.truth
        found = truth.cancels if sent.asked.withdraws else truth.copies
        return found[sent.message]

    def _any_gone(self, key: Key) -> bool:
        truth = self._world.truth
        return truth.is_any_gone((*truth.copies[key], *truth.cancels[key]))

    def _is_gone(self, key: Key) -> bool:
        """Whether disks had it, and none does any more."""
        return self._world.truth.are_gone(self._world.truth.copies[key])

    def _trace(self, what: str, sent: Sent) -> None:
        self._world.trace.add("kafka", what, f"i{sent.number}")

    def _fail(self, what: str) -> None:
        at_ms = self._world.scheduler.now_us // US_PER_MS
        self._world.violation(f"ingress at {at_ms} ms: {what}")


def _word(committed: bool | None) -> str:
    return "open" if committed is None else "aborted"
