"""Checks of half messages, against what became of each one's local transaction.

| | invariant | checked at |
|---|---|---|
| 1 | sent on only if its local transaction was committed, whatever is lost | each commit |
| 2 | one end: delivered, passed on, a dead letter, cancelled or asked | each commit |
| 3 | recorded as committed in time: nobody is asked, unless something was wrong | the end |
| 4 | the letter is the message, says what its group must know, and comes with its outcome | each commit |
| 5 | who was told CANCELLED: it is not sent, and nobody is asked | each commit and answer |
| 6 | each letter has one answer: sent on, dropped, or a dead letter at last | each commit |
| 7 | a letter that is UNKNOWN comes back, later each time, and not early | each check |
| 9 | sent through ingress: it has its end; committed well before its due, it arrives before that | the end |
| 10 | what the group answered is an outcome, once | each commit; the end |
| 11 | a record that begins one is refused only if nobody can be asked, or its wheel was lost | each commit |
| 12 | nobody could be asked: once replayed, its letter is as any other, and the half has the one end that its group says | each replay; the end |
| 8 | no release that does not know halves may lead where there are some | each acknowledgement |

Numbers 3 and 9 hold where nothing was wrong. What is sent on goes to the ingress topic, by a leader or by the checker. It is a record like any
other there, so that `checking/ingress.py` watches it from then on: with its own due, its own bytes
and headers, once.

The database: when a group is asked before the local transaction has ended, its barrier rolls that
back (`checker.py`).
"""  # noqa: E501 - rows of a table

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from delaywheel.consumer.message import Outcome, Settlement
from delaywheel.deadletters.letter import REPLAYED_HEADER, Letter
from delaywheel.ingress import DELIVER_AT, TOPIC, HalfAnswer
from delaywheel.record_headers import COMMITTED, HALF_GROUP, HALF_TOPIC
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason
from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import UnfitReason
from delaywheel_replica.core.leader.halves import KNOWN_SINCE
from delaywheel_replica.core.protocol.reschedules import MessageKey
from sim.checking.book import GROUP, Entry
from sim.checking.calm import is_calm_from
from sim.checking.ingress import ORIGIN, READY_US, REASON
from sim.checking.ingress_book import Headers, Sent
from sim.checking.letters import latest_clock_us, were_halves_unavailable
from sim.checking.truth import Key, key_in
from sim.kafka.log import Entry as LogEntry
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS
from sim.plans.plan import Action

if TYPE_CHECKING:
    from sim.nodes.world import World

IN_TIME_MS = 300
"""A commit that is recorded so long before the due counts at it, if nothing is wrong."""

READ_MS = 1_500
"""The same of a commit in the ingress topic: it is read, announced and handed over before."""

LEVELS_MS = (1_000, 2_000, 4_000)
"""How long a letter is away after each check that was UNKNOWN."""

WORDS = {
    Outcome.FORWARDED: "committed",
    Outcome.DONE: "rolled-back",
    Outcome.DEAD: "undecided",
}
"""What a leader notes of an answer."""

OURS = 4
"""How many headers every record of a leader ends with."""


class HalvesChecks:
    """Checks the halves of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ends: Counter[Key] = Counter()
        self._asked: set[Key] = set()
        self._sent_on: set[Key] = set()
        self._dead: set[Key] = set()
        self._unasked: set[Key] = set()
        self._answers: Counter[Key] = Counter()
        # What the checker has answered, and what leaders say that it has.
        self._words: defaultdict[Key, list[str]] = defaultdict(list)
        self._told: defaultdict[Key, list[str]] = defaultdict(list)
        self._told_us: dict[Key, int] = {}
        self._checked_us: dict[Key, int] = {}
        # Of each letter that comes back: for which attempt, and when it may be there.
        self._next: dict[Key, tuple[int, int]] = {}
        # Where each letter that was put off is away.
        self._away: dict[Key, Sent] = {}

    # --- what nodes and callers do

    def acknowledged(self, entry: Entry) -> None:
        """Checks a half that was accepted."""
        if entry.is_half and self._world.checks.control.needs < KNOWN_SINCE:
            self._fail(f"an older release would lead past the half {entry}")

    def was_asked(self, entry: Entry) -> bool:
        """Whether the group was asked about a half."""
        return entry.key in self._asked

    def could_not_be_asked(self, entry: Entry) -> bool:
        """Whether a half is a dead letter for that."""
        return entry.key in self._unasked

    def has_answered(self, entry: Entry, answer: HalfAnswer) -> bool:
        """Whether that is what the group has answered last, as everybody can read."""
        return self._told[entry.key][-1:] == [answer]

    def was_told(self, entry: Entry, before_us: int) -> bool:
        """Whether everybody could read an answer of the group by then."""
        return self._told_us.get(entry.key, before_us) < before_us

    def cancelled(self, entry: Entry) -> None:
        """Checks a half of which a caller hears that it is cancelled."""
        if {entry.key} & (self._asked | self._sent_on) and not self._is_cancel_gone(entry):
            self._fail(f"{entry} is reported cancelled, and was asked about, or sent on")

    # --- what leaders commit

    def delivered(self, entry: Entry) -> None:
        """Checks a half that went to its topic."""
        if entry.is_half:
            self._goes(entry, "delivered")
            self._ended(entry)

    def as_sent(self, entry: Entry, headers: Headers) -> Headers:
        """Returns the headers of a delivered message without what says when it was committed."""
        if not (entry.is_half and headers and headers[-1][0] == COMMITTED):
            return headers
        committed_ms = int(headers[-1][1] or 0)
        if committed_ms >= entry.due_ms:
            self._fail(f"{entry} arrives at its commit, and that was at {committed_ms}")
        return headers[:-1]

    def outcome(self, entry: Entry, outcome: str) -> None:
        """Checks a half that ended otherwise."""
        if entry.is_half and outcome in {"cancelled", "asked", "committed"}:
            self._ended(entry)
        if outcome in {"asked", "committed"} and not entry.is_half:
            self._fail(f"{entry} is no half, and has the outcome {outcome}")
        if outcome == "asked" and entry.key not in self._asked:
            self._fail(f"{entry} is said to be asked about, and has no letter")

    def refused(self, letter: LogEntry) -> bool:
        """Checks the dead letter of a record that begins a half; returns whether it is one."""
        ours = {name: value or b"" for name, value in letter.headers}
        due_ms = int(ours.get(DELIVER_AT) or 0)
        key = MessageKey(ours["dw-id"], due_ms, ours.get(TOPIC, b"").decode())
        entry = self._world.book.by_key.get(key)
        if entry is None or HALF_GROUP not in ours or ORIGIN not in ours:
            return False
        self._world.trace.add("kafka", "refuses", f"m{entry.number}")
        self._dead.add(entry.key)
        self._ended(entry)
        if (letter.key, letter.value) != (entry.record_key, entry.value):
            self._fail(f"{entry} is a dead letter with other bytes")
        reason = ours[REASON].decode()
        is_true = reason == UnfitReason.WHEEL_LOST or (
            reason == UnfitReason.HALVES_UNAVAILABLE and were_halves_unavailable(self._world)
        )
        if not is_true:
            self._fail(f"{entry} is refused, and nothing is wrong with it: {ours}")
        return True

    def is_refused(self, report: Mapping[str, Any]) -> bool:
        """Whether an outcome is of a record that begins a half, and is a dead letter."""
        if report["outcome"] != "ingress-dead-lettered" or "id" not in report:
            return False
        half = MessageKey(bytes.fromhex(report["id"]), report["due_ms"], report["topic"])
        return half in self._dead

    def dead(self, entry: Entry, reason: bytes) -> None:
        """Checks a half that is a dead letter: its message, or a letter that asks nobody."""
        if not entry.is_half:
            return
        self._dead.add(entry.key)
        self._ended(entry)
        if reason.decode() == DeadReason.HALVES_UNAVAILABLE:
            self._unasked.add(entry.key)
        else:
            self._goes(entry, "a dead letter of its topic")

    def told(self, key: Key, answer: str) -> None:
        """Checks an outcome that says what a group has answered."""
        told, words = self._told[key], self._words[key]
        told.append(answer)
        self._told_us[key] = self._world.scheduler.now_us
        if told != words[: len(told)]:
            self._fail(f"{self._world.book.by_key.get(key)}: answered {words}, and told {told}")

    def passed_on(self, record: LogEntry) -> None:
        """Checks a committed half that a leader sends to the ingress topic, for its own due."""
        entry = self._half(record.headers)
        if entry is None:
            self._fail(f"what is no half is sent to the ingress topic: {record.headers}")
            return
        self._goes(entry, "passed on")
        own = record.headers[:-OURS]
        headers: Headers = [*own, ("dw-id", entry.key.id.hex().encode())]
        written = Record(record.topic, record.key, record.value, headers)
        place = IngressPlace(record.topic, record.partition, record.offset)
        self.sends(written, place, entry.headers).is_committed = True
        self._sent_on.add(entry.key)

    def asked(self, letter: LogEntry) -> None:
        """Checks a letter."""
        self._check_letter(letter, letter.headers)

    def _check_letter(self, letter: LogEntry, headers: Headers) -> None:
        entry = self._half(headers)
        if entry is None:
            self._fail(f"a letter about what is no half: {letter.headers}")
            return
        if entry.cancelled and not self._is_cancel_gone(entry):
            self._fail(f"{entry} is asked about after it was cancelled")
        self._asked.add(entry.key)
        deliver_at_ms = entry.due_ms + 1 if entry.deliver_at_ms is None else entry.deliver_at_ms
        own = [
            *entry.headers,
            ("dw-half", GROUP),
            ("dw-half-topic", entry.topic.encode()),
            ("dw-half-deliver-at", b"%d" % deliver_at_ms),
        ]
        if (letter.key, letter.value) != (entry.record_key, entry.value):
            self._fail(f"the letter about {entry} has other contents")
        if headers[:-OURS] != own:
            self._fail(f"the letter about {entry} has other headers: {letter.headers}")

    # --- what operator and checker do

    def replayed(self, letter: Letter, record: LogEntry) -> None:
        """Checks a letter with which nobody could be asked, and that was sent again."""
        topic = (dict(record.headers).get(HALF_TOPIC) or b"").decode()
        key = MessageKey(bytes.fromhex(letter.id), letter.due_ms or 0, topic)
        entry = self._world.book.by_key.get(key)
        self._world.trace.add("operator", "replays", entry and f"m{entry.number}")
        if key not in self._unasked or key in self._asked:
            self._fail(f"{entry} is replayed, and had no letter, or it was replayed before")
        *headers, (name, _) = record.headers
        if (record.topic, name) != (self._world.names.halves, REPLAYED_HEADER):
            self._fail(f"{entry} is replayed to {record.topic}: {record.headers}")
        self._check_letter(record, headers)

    def checked(self, entry: Entry, attempt: int, settlement: Settlement) -> None:
        """Checks a letter that the checker has read, and what it says."""
        said = settlement.reason or settlement.outcome.name
        self._world.trace.add("checker", f"attempt {attempt} at m{entry.number}:", said)
        expected, from_us = self._next.get(entry.key, (1, 0))
        if attempt != expected and not self._any_is_gone(entry):
            self._fail(f"{entry} is asked about for the {attempt}. time, expected {expected}")
        self._checked_us[entry.key] = self._world.scheduler.now_us
        # A leader's clock may have drifted ahead before; it counts whole milliseconds.
        by_clock_us = latest_clock_us(self._world) + US_PER_MS
        if by_clock_us < from_us and is_calm_from(self._world.plan, entry.sent_us):
            self._fail(f"the letter about {entry} comes back before its level is over")

    def sends(self, record: Record, place: IngressPlace, own: Headers | None) -> Sent:
        """Notes a record that goes to the ingress topic.

        Args:
            record: The record.
            place: Where it lies.
            own: The headers that have to arrive; None: those that mean nothing to ingress.
        """
        topic_id = self._world.kafka.topic_id(place.topic)
        return self._world.ingress.book.answer(
            record, topic_id, place, own, self._world.scheduler.now_us
        )

    def answered(
        self, entry: Entry, settlement: Settlement, sent: Sent | None, *, is_committed: bool
    ) -> None:
        """Checks an answer, once its transaction is decided."""
        if sent is not None:
            sent.is_committed = is_committed
        if not is_committed:
            return
        self._world.trace.add("kafka", settlement.outcome.name, f"is the answer on m{entry.number}")
        if settlement.outcome is Outcome.RETRIED:
            assert sent is not None
            self._away[entry.key] = sent
            attempt, _ = self._next.get(entry.key, (1, 0))
            level_us = LEVELS_MS[attempt - 1] * US_PER_MS
            self._next[entry.key] = attempt + 1, self._checked_us[entry.key] + level_us
            return
        self._answers[entry.key] += 1
        self._words[entry.key].append(WORDS[settlement.outcome])
        if self._answers[entry.key] > 1 and not self._any_is_gone(entry):
            self._fail(f"{entry} has a second answer")
        match settlement.outcome:
            case Outcome.FORWARDED:
                self._goes(entry, "sent on by its group")
                self._sent_on.add(entry.key)
            case Outcome.DONE:
                if entry.committed:
                    self._fail(f"{entry} is dropped, and its transaction was committed")
            case Outcome.DEAD:
                if entry.unknowns <= len(LEVELS_MS):
                    self._fail(f"{entry} is a dead letter after a check that knew")
            case other:
                self._fail(f"the checker settles {entry} as {other.name}")

    # --- when everything has drained

    def check_at_the_end(self) -> None:
        """Checks the drained cluster."""
        for entry in self._world.book.entries.values():
            if not entry.is_half:
                continue
            was_asked = entry.key in self._asked
            if entry.key in self._unasked and not was_asked:
                self._fail(f"nobody was asked about {entry}, after its dead letter either")
            if self._told[entry.key] != self._words[entry.key] and not self._loses_records():
                words, told = self._words[entry.key], self._told[entry.key]
                self._fail(f"{entry}: answered {words}, and told {told}")
            if was_asked and not self._answers[entry.key] and not self._is_away_for_good(entry):
                self._fail(f"the letter about {entry} has no answer")
            due_us = (entry.due_ms - EPOCH_MS) * US_PER_MS
            in_time = 0 <= entry.committed_us <= due_us - IN_TIME_MS * US_PER_MS
            if not is_calm_from(self._world.plan, entry.sent_us):
                continue
            if in_time and was_asked:
                self._fail(f"{entry} was committed in time, and its group is asked")
            if entry.recorded_at:
                self._check_recorded(entry, due_us)

    def _check_recorded(self, entry: Entry, due_us: int) -> None:
        """Checks a half that was sent through ingress, where nothing was wrong.

        What a sender left open may keep its records from being read; its group is asked at once if
        its hold is over by then, without an outcome.
        """
        early_us = due_us - READ_MS * US_PER_MS
        is_read = [
            early_us >= READY_US and partition.stable_at(early_us) > offset
            for partition, offset in entry.recorded_at
        ]
        if not self._ends[entry.key] and (is_read[0] or entry.key not in self._asked):
            self._fail(f"{entry} was sent through ingress, and has no end")
        is_early = len(is_read) > 1 and all(is_read)
        if not is_early or entry.cancel_tried:
            return
        if entry.key in self._asked:
            self._fail(f"{entry} was committed in time through ingress, and its group is asked")
        if entry.deliver_at_ms is None and not 0 <= entry.visible_us < due_us:
            self._fail(f"{entry} was committed through ingress, and waited for the end of its hold")

    # --- inside

    def _goes(self, entry: Entry, how: str) -> None:
        """Checks a half whose message is delivered now, or will be."""
        if not entry.committed:
            self._fail(f"{entry} is {how}, and its transaction was not committed")
        if entry.cancelled and not self._is_cancel_gone(entry):
            self._fail(f"{entry} is {how} after it was cancelled")

    def _ended(self, entry: Entry) -> None:
        self._ends[entry.key] += 1
        if self._ends[entry.key] > 1 and not self._any_is_gone(entry):
            self._fail(f"{entry} has a second end")

    def _half(self, headers: Headers) -> Entry | None:
        """The half that a leader's record is about."""
        ours = dict(headers)
        entry = self._world.book.by_key.get(key_in(ours, ""))
        return entry if entry is not None and entry.is_half else None

    def _loses_records(self) -> bool:
        steps = self._world.plan.steps
        return any(
            isinstance(step, Action)
            and (step.kind.startswith("ingress_") or step.kind == "at_moment")
            for step in steps
        )

    def _is_away_for_good(self, entry: Entry) -> bool:
        """Whether its letter was lost with what it came back through."""
        sent, truth = self._away.get(entry.key), self._world.truth
        if sent is None:
            return False
        is_gone = truth.is_any_gone(truth.copies[sent.message])
        return is_gone or (sent.excuse is not None and sent.settled_us < 0)

    def _is_cancel_gone(self, entry: Entry) -> bool:
        truth = self._world.truth
        return truth.are_gone(truth.cancels[entry.key])

    def _any_is_gone(self, entry: Entry) -> bool:
        """Whether a frame that had a part in its end was lost."""
        truth, key = self._world.truth, entry.key
        return truth.is_any_gone((*truth.copies[key], *truth.commits[key], *truth.cancels[key]))

    def _fail(self, what: str) -> None:
        self._world.violation(what)
