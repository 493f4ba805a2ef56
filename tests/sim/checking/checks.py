"""Invariants of every run, each checked as early as possible.

The numbers are those of docs/PROTOCOL.md:

| | invariant | checked at |
|---|---|---|
| 1 | acknowledged, not cancelled: visible exactly once | each commit; when all is drained |
| 2 | nothing is delivered before its due, by the leader's clock | each produce |
| 3 | never acknowledged: at most once | each commit |
| 4 | the same bytes | each commit |
| 5 | progress never goes back, nor ahead of what is visible | each progress record |
| 6 | one epoch commits at a time | each progress record |
| 7 | copies are equal | each start; when all is drained |
| 8 | deleted = below the committed floor = finished | each floor, write and deletion |
| 9 | everything is bounded | each second |
| 10 | everything drains | when all is healed |
| 11 | an acknowledged cancel is never delivered | each commit, and each answer (answers.py) |
| 12 | once w was set back: at its due, in wheels that take what is due | each commit and refusal |

Also checked, as early signs: W disks hold what is acknowledged; a committed end T covers what was
acknowledged; a frame is committed as lost only when no disk has it; with synced groups what is
reported is on the medium; a node whose machine has lost what it had reported starts as incomplete.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING

from delaywheel.identity import WheelId
from delaywheel.record_headers import FIRST_DUE
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.cleaner.leadership import Leadership
from delaywheel_replica.cleaner.outside.ports import IDS
from delaywheel_replica.cleaner.row_keeper import View
from delaywheel_replica.core.election.eligibility import CLOCKS
from delaywheel_replica.core.member.member import MemberRefusal
from delaywheel_replica.core.node.events import HeldWheel
from delaywheel_replica.core.protocol.control import NEEDS_KEY, OPENING, ControlState, WheelRecord
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameRange, FrameSet
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.core.wheels.mirrors import AHEAD_SECONDS
from delaywheel_replica.server.commit.time_sharing import TIME_SLICE_MS
from sim.checking.book import Entry, Fate
from sim.checking.calm import (
    are_clocks_right,
    is_calm_beside,
    is_calm_when_set_back,
    wrong_candidacies,
    wrong_closes,
)
from sim.checking.held_up import held_up, held_up_by_media, wrong_report
from sim.checking.letters import has_expired_long_ago, wrong_letter
from sim.checking.truth import FrameName, FrameTruth, Key, RewrittenError, key_in
from sim.kafka.log import Entry as LogEntry
from sim.kafka.log import Transaction
from sim.machine.clocks import EPOCH_MS, true_wall_ms
from sim.machine.scheduler import US_PER_MS
from sim.nodes.senders import SENDER
from sim.nodes.waiting import GROUP_US, HELD_FILES
from support.core.violations import violations

if TYPE_CHECKING:
    from sim.nodes.node import SimNode
    from sim.nodes.world import World

OWN_HEADERS = ("dw-id", "dw-due", "dw-accepted", "dw-wheel")
EARLY_MS = 12_000
"""A leader whose clock is further ahead than this differs from Kafka's, which is right."""

NEW_WHEELS_US = 10_000 * US_PER_MS
"""After w is set back, each node has other wheels by then, if nothing else happens."""

LATE_US = 5_000 * US_PER_MS
"""No message is later than this after w is set back, if nothing else happens."""

PAUSE_LEAST_S = 0.001
MOST_IDLE_ITERATIONS = 25
"""A leader pauses so briefly only in front of what it can do: so many times, and it is mistaken."""

LOST = "it lost its end"

LOSE_NOTHING = ("unreadable", "disk_error", "slow_files", "kill_server", "kill_cleaner")
"""Faults after which every frame that was on a medium is there, or was deleted when finished."""


class Checks:
    """Watches one run.

    Attributes:
        control: what is committed, in the order of the log.
        outcomes: for each message, what the outcomes topic says.
        lost: frames reported lost in the outcomes topic.
        closed_at: the committed T of every wheel that ever had one.
        registered: every wheel that was ever registered.
        given_up: frames that were ever committed as lost.
        floor: the committed floor, which readers see a little later.
        rescheduled: the dues that messages were ever given.
        delivered: for each message, how often it was delivered, or became a dead letter.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._truth = world.truth
        self._book = world.book
        self._halves = world.halves
        self._ingress = world.ingress
        self.control = ControlState()
        self.outcomes: defaultdict[Key, list[str]] = defaultdict(list)
        self.lost = NO_FRAMES
        self.closed_at: dict[WheelId, int] = {}
        self.registered: dict[WheelId, WheelRecord] = {}
        self.given_up = NO_FRAMES
        self.floor = 0
        self.rescheduled: defaultdict[Key, set[int]] = defaultdict(set)
        self.delivered: Counter[Key] = Counter()
        self._reported: dict[
            tuple[str, str, WheelId], HeldWheel
        ] = {}  # the newest, as keyed in Truth.had
        self._opened: set[WheelId] = set()
        self._high_watermarks: Counter[WheelId] = Counter()
        self._deferred: Counter[Key] = Counter()
        self._marks: dict[int, Transaction] = {}
        self._elected: int | None = None
        self._taken: Counter[WheelId] = Counter()
        self._unregistered: set[WheelId] = set()
        self._undone: list[tuple[int, Key, FrameName]] = []
        self._unfinished: defaultdict[int, list[Entry]] = defaultdict(list)
        self._duplicates: list[Entry] = []
        self._set_back_us = 0
        self.progress_ms: list[tuple[int, int]] = []
        self.leaders: list[tuple[int, str]] = []
        self._idle: dict[str, tuple[int, int]] = {}  # transactions, and iterations since the last

    # --- what nodes do

    def opened(self, node: SimNode, wheel: WheelId) -> None:
        """Checks an opened wheel: each is opened only once."""
        if wheel in self._opened:
            self._fail(f"{node.name} opens {wheel}, which was opened before")
        if wheel not in self.registered:
            self._fail(f"{node.name} opens {wheel}, which is not registered")
        self._opened.add(wheel)

    def written(self, node: SimNode, wheel: WheelId) -> None:
        """Notes that an origin has appended to its wheel."""
        for frame in self._truth.look(node.disk, wheel):
            if frame.slot < self.floor and frame.seq <= self.closed_at.get(wheel, frame.seq):
                self._fail(f"{wheel}/{frame.seq} is for {frame.slot}, below floor {self.floor}")
            if self._is_beyond_belief(frame.slot):
                self._fail(f"{node.name} writes {wheel}/{frame.seq}, which no mirror believes")
        storage = node.storage
        if storage is not None:
            self._truth.held(storage, node.boot, wheel, self._truth.last_seq(wheel))

    def _is_beyond_belief(self, slot: int) -> bool:
        """Whether a slot lies further ahead than the other nodes take anything for."""
        world = self._world
        last_slot = true_wall_ms(world.scheduler) // 1000 + world.settings.span_s + AHEAD_SECONDS
        alone = len(world.members) < CLOCKS or not is_calm_beside(world.plan, "clock_step")
        return slot > last_slot and not alone

    def looked(self, node: SimNode) -> None:
        """Notes what a node has written so far, whether or not it was told of it."""
        for wheel in _own_wheels(node):
            self._truth.look(node.disk, wheel)

    def started(self, node: SimNode) -> None:
        """Notes that a server has looked into its folder."""
        self.looked(node)
        self.disturbed()
        assert node.server is not None
        if node.has_lost and not node.server.store.state.all_incomplete:
            self._fail(f"{node.name} starts as complete, and its machine has lost {node.has_lost}")
        node.has_lost = None

    def reported_on(self, node: SimNode) -> list[FrameTruth]:
        """Returns what a disk holds of what its node has said to hold, since its machine booted."""
        storage = node.storage
        if storage is None:
            return []
        had = self._truth.had
        return [
            frame
            for frame in self._truth.live(self.floor)
            if frame.seq <= had.get((storage, node.boot, frame.wheel), 0)
            and (frame.wheel.node != node.name or self.is_acknowledged((frame.wheel, frame.seq)))
            and frame.is_on(node.disk, with_row=True)
        ]

    def verified(self, node: SimNode, held: HeldWheel) -> None:
        """Notes that a server has recovered a wheel that it found there."""
        self.held(node, held)
        self._check_again(node, held.card.wheel)

    def held(self, node: SimNode, held: HeldWheel) -> None:
        """Notes how far a node holds a wheel; it may not know yet that a frame is given up."""
        storage, wheel = node.storage, held.card.wheel
        self._look_for(wheel, held.applied, node)
        if storage is not None:
            place = storage, node.boot, wheel
            self._reported[place] = held
            before, prefix = self._truth.had[place], self._prefix(held)
            self._truth.held(*place, prefix)
            self._check_reported(node, wheel, range(before + 1, prefix + 1))

    def _look_for(self, wheel: WheelId, to_seq: int, *nodes: SimNode) -> None:
        """Looks at frames that are not known yet: on the disks of these nodes and of their origin.

        So a frame counts although its server did not write its row before the machine crashed, or
        could not open the index before it left the wheel.
        """
        origin = self._world.nodes.get(wheel.node)
        for node in nodes if origin is None else (origin, *nodes):
            if not self._truth.is_known(wheel, to_seq):
                self._truth.look(node.disk, wheel)

    def _check_reported(self, node: SimNode, wheel: WheelId, seqs: range) -> None:
        """Checks frames that a node is about to report: they are on its medium, if it says so."""
        for seq in seqs:
            frame = self._truth.frames.get((wheel, seq))
            if (wheel, seq) in self.given_up:
                continue
            if frame is None:
                self._fail(f"{node.name} reports {wheel}/{seq}, which nobody wrote")
                continue
            if frame.slot < self.floor or not node.sync_groups:
                continue
            if frame.is_on(node.disk, with_row=True) and not frame.is_durable_on(node.disk):
                self._fail(f"{node.name} reports {wheel}/{seq}, which is not synced")

    def _prefix(self, held: HeldWheel) -> int:
        """Returns up to where it holds a wheel; a frame that is given up is not missing."""
        wheel = held.card.wheel
        missing = held.missing - self.given_up.seqs(wheel)
        return missing.first - 1 if missing else held.applied

    def iterated(self, node: SimNode, leadership: Leadership, wait_s: float) -> None:
        """Checks an iteration of a cleaner: it does not stand before its own server's first report.

        Nor does it spin over what it cannot do.
        """
        role = leadership.role
        if role is not Role.STANDBY and node.server_row() is None:
            self._fail(f"{node.name} is {role} while its server starts")
        if wait_s > PAUSE_LEAST_S:
            self._idle.pop(node.name, None)
            return
        counters = leadership.counters
        tried = counters["transactions"] + counters["failed_transactions"]
        before, iterations = self._idle.get(node.name, (tried, 0))
        self._idle[node.name] = (tried, iterations + 1 if before == tried else 1)
        if iterations == MOST_IDLE_ITERATIONS:
            self._fail(
                f"{node.name} makes {iterations} iterations without a pause, and none does anything"
            )

    def reports(self, node: SimNode, view: View) -> None:
        """Checks a status: why a cleaner does not lead, and what a leader says of what waits.

        It mistakes no newer report for a loss.
        """
        error = view.kafka_error
        if error is not None and LOST in error and not self._world.kafka.has_lost_end:
            self._fail(f"{node.name} reports that {error}, and Kafka has it all")
        self._fail_all(wrong_report(self._world, node, view))

    def held_up(self, node: SimNode, us: int) -> None:
        """Checks how long a group of callers waited for other work of its node.

        Short effects may take a time slice of it, and the last of them its files (`do_next`).
        """
        since_us = self._world.scheduler.now_us - us
        file_us = node.longest_disk_wait_us(since_us)
        us -= node.paused_us(since_us)
        allowed_us = TIME_SLICE_MS * US_PER_MS + HELD_FILES * file_us + GROUP_US
        if us > allowed_us and not node.sync_groups:
            self._fail(f"{node.name} holds up a group for {us // US_PER_MS} ms")

    def acknowledged(self, node: SimNode, wheel: WheelId, seq: int) -> None:
        """Checks an acknowledgement: W members hold it, as far as the origin can know."""
        if seq <= self._high_watermarks[wheel]:
            return
        self._check_reported(node, wheel, range(self._high_watermarks[wheel] + 1, seq + 1))
        self._high_watermarks[wheel] = seq
        record = self.registered[wheel]
        holders = [
            name
            for name, storage in record.members.items()
            if self._had(node, name, storage, wheel) >= seq
        ]
        if len(holders) < record.min_insync:
            self._fail(f"{node.name} acknowledges {wheel}/{seq}, held by {holders} alone")
        if self.closed_at.get(wheel, seq) < seq:
            self._fail(f"{node.name} acknowledges {wheel}/{seq}, beyond {self.closed_at[wheel]}")

    def _had(self, origin: SimNode, member: str, storage: str, wheel: WheelId) -> int:
        """Returns what a member held in the boots that its origin may know of."""
        sim = self._world.nodes[member]
        row = origin.server_row()
        heard = None if row is None else row.heartbeat.heard.get(member)
        boots = {sim.boot, sim.boot if heard is None else heard.boot}
        return max(self._truth.had[storage, boot, wheel] for boot in boots)

    def deletes(self, node: SimNode, path: Path) -> None:
        """Checks a file that a node is about to delete."""
        slot = layout.slot_of_name(path.name)
        if slot is None or slot < self.floor:
            return
        wheel = WheelId.parse(path.parts[-4])
        record = self.control.wheels.get(wheel)
        if record is None:
            return
        end = self._truth.last_seq(wheel) if record.closed_at is None else record.closed_at
        for frame in self._truth.of_wheel(wheel):
            if frame.slot == slot and frame.seq <= end and frame.is_on(node.disk, with_row=True):
                self._fail(f"{node.name} deletes {path} with {wheel}/{frame.seq} in it")

    def disturbed(self) -> None:
        """Notes a fault of disks: frames that no disk has any more are gone."""
        nodes = [node for node in self._world.nodes.values() if not node.is_gone]
        for frame in self._truth.live(self.floor):
            if not frame.gone and not any(_has(node, frame) for node in nodes):
                frame.gone = True
                self._world.trace.add("truth", "gone from all disks", f"{frame.wheel}/{frame.seq}")

    def produces(self, node: SimNode, key: Key, wall_ms: int) -> None:
        """Checks a message that a leader hands to Kafka; its clock showed up to this time."""
        due_ms, entry = key.due_ms, self._book.by_key.get(key)
        if entry is not None and entry.is_half:
            return  # it may be sent before the end of its hold
        if wall_ms < due_ms:
            self._fail(f"{node.name} forwards what is due {due_ms} at {wall_ms}")
        true_ms = true_wall_ms(self._world.scheduler)
        can_know = len(self._world.members) < CLOCKS and not self._world.kafka.has_wrong_clock
        if true_ms + EARLY_MS < due_ms and can_know:
            self._fail(
                f"{node.name} forwards what is due {due_ms} at {true_ms}: early by its clock"
            )

    def refused_as_sealed(self, node: SimNode, key: Key, seal_slot: int) -> None:
        """Checks a message refused for a seal, which is wrong if its second is still to come.

        If there are too few clocks to find the wrong one, w itself may have gone ahead, and
        the seals with it; when it was set back, each node gets other wheels.
        """
        self._world.answers.sealed.add(key)
        if seal_slot <= self.floor:
            return
        slot, progress = key.due_ms // 1000, self.control.progress
        done_ms = 0 if progress is None else progress.due_ms
        if progress is not None and progress.ahead_ms is not None and self._may_be_old():
            done_ms = progress.ahead_ms
        if slot > max(node.clock.wall_ms(), done_ms) // 1000:
            self._fail(f"{node.name} refuses slot {slot}, still to come, as sealed at {seal_slot}")

    def _may_be_old(self) -> bool:
        """Whether nodes may still use wheels opened before w was set back."""
        since_us = self._world.scheduler.now_us - self._set_back_us
        return since_us < NEW_WHEELS_US or not is_calm_when_set_back(self._world.plan)

    # --- what callers learn

    def caller_acknowledged(self, entry: Entry) -> None:
        """Checks an accepted message."""
        self._halves.acknowledged(entry)
        if not self._truth.copies[entry.key]:
            self._fail(f"{entry} is acknowledged and was never written")
        if entry.slot < self.floor:
            self._finished(entry)
        else:
            self._unfinished[entry.slot].append(entry)

    def _check_dues(self, entry: Entry) -> None:
        """Checks that a rescheduled message is delivered at one of its dues."""
        if self.deliveries(entry) > 1 and not self.is_any_gone(entry):
            dues = [str(each) for each in self._book.family(entry) if self.delivered[each.key]]
            self._fail(f"{entry} is delivered twice, at several dues: {dues}")

    def deliveries(self, entry: Entry) -> int:
        """How often a message was delivered, at any of its dues."""
        return sum(self.delivered[each.key] for each in self._book.family(entry))

    def is_any_gone(self, entry: Entry) -> bool:
        """Whether a frame with anything about the message was lost."""
        truth = self._truth
        return any(
            self._truth.is_any_gone(truth.copies[each.key])
            or self._truth.is_any_gone(truth.cancels[each.key])
            for each in self._book.family(entry)
        )

    # --- what is committed

    def decided(self, transaction: Transaction) -> None:
        """Checks a transaction that is committed, or aborted."""
        if not transaction.committed or transaction.node == SENDER:
            return
        names = self._world.names
        for entry in transaction.entries:
            if entry.topic == names.outcomes:
                self._outcome(entry)
            elif entry.topic == names.dead:
                self._dead(entry)
            elif entry.topic == names.halves:
                self._halves.asked(entry)
            elif entry.topic == names.ingress:
                self._passed_on(entry)
            elif entry.topic != names.control:
                self._deliver(entry)
            else:
                self._committed(ControlState().apply(entry.key, entry.value, entry.offset))
        self._check_duplicates()
        self._ingress.decided(transaction)
        last = transaction.entries[-1] if transaction.entries else None
        # An id that may have one record says which ids are left out, or nothing.
        vouches = [entry.key for entry in transaction.entries] in ([OPENING[0].encode()], [b"ids"])
        is_of_progress = last is None or last.key == b"progress" or _is_mark(last)
        if not (is_of_progress or vouches):
            self._fail(f"a transaction of {transaction.node} is committed without its progress")

    def _passed_on(self, log_entry: LogEntry) -> None:
        """Checks what a leader sends to the ingress topic."""
        self._ingress.check_is_read(log_entry)
        if FIRST_DUE not in dict(log_entry.headers):
            self._halves.passed_on(log_entry)
            return
        ours = dict(reversed(log_entry.headers))  # the first `dw-id` is that of its delivery
        key = key_in(ours, log_entry.topic)
        entry = self._book.of(key)
        self._ingress.defers(log_entry, key, entry)
        if entry is not None:
            self._world.trace.add("kafka", "defers", f"m{entry.number}")
            self._deferred[key] += 1
            if self._deferred[key] > 1 and not self._truth.is_any_gone(self._truth.copies[key]):
                self._fail(f"{entry} is deferred twice")

    def _committed(self, news: ControlState) -> None:
        """Takes in a control record that counts, though no reader sees it yet."""
        for wheel, record in news.wheels.items():
            self.registered.setdefault(wheel, record)
        for key, reschedule in news.reschedules.items():
            self.rescheduled[key].add(reschedule.to_ms)
        if news.lost:
            self._give_up(news.lost)
        if news.progress is not None:
            self.floor = max(self.floor, news.progress.floor)
            self.progress_ms.append((self._world.scheduler.now_us, news.progress.due_ms))

    def _give_up(self, lost: FrameSet) -> None:
        """Takes in frames that are given up: a node missing only these now holds more."""
        self.given_up |= lost
        wheels = {wheel for wheel, _ in lost.items()}
        for place, held in self._reported.items():
            if held.card.wheel in wheels:
                self._truth.held(*place, self._prefix(held))

    def visible(self, entries: list[LogEntry]) -> None:
        """Checks records that become readable, in the order of their logs."""
        for entry in entries:
            if entry.topic == self._world.names.control:
                self._control(entry)

    def _deliver(self, log_entry: LogEntry) -> None:
        if self._ingress.deliver(log_entry):
            return
        own = {name: value or b"" for name, value in log_entry.headers[-len(OWN_HEADERS) :]}
        if tuple(own) != OWN_HEADERS:
            self._fail(f"a record with headers {log_entry.headers}")
            return
        key = key_in(own, log_entry.topic)
        entry = self._book.of(key)
        if entry is None:
            self._fail(f"a record that nobody sent: {own}")
            return
        entry.visible_us = self._world.scheduler.now_us
        wheel = own["dw-wheel"].decode().rpartition("/")[2]
        self._world.trace.add("kafka", "delivers", f"m{entry.number}", wheel)
        self._halves.delivered(entry)
        self.delivered[key] += 1
        copies = self._truth.copies[key]
        if self.delivered[key] > 1 and not self._truth.is_any_gone(copies):
            self._fail(f"{entry} is delivered twice")
        self._check_not_cancelled(entry, "delivered")
        self._check_dues(entry)
        if entry.fate is Fate.UNSENT:
            self._fail(f"{entry} is delivered before it was sent")
        if entry.fate is Fate.REFUSED:
            self._fail(f"{entry} is delivered, and its caller was told that it is refused")
        self._check_time(entry)
        if has_expired_long_ago(entry, entry.visible_us):
            self._fail(f"{entry} is delivered, and has expired")
        headers = self._halves.as_sent(entry, log_entry.headers[: -len(OWN_HEADERS)])
        content = log_entry.topic, log_entry.key, log_entry.value, headers
        if content != (entry.topic, entry.record_key, entry.value, entry.headers):
            self._fail(f"{entry} is delivered with other bytes: {content}")

    def _check_not_cancelled(self, entry: Entry, end: str) -> None:
        """Checks a message that ends otherwise: no caller was told that it is cancelled."""
        original = entry.original or entry
        # The mark of the reschedule is a cancel too: it came after that one was lost.
        counted = self._world.answers.cancelled_by
        cancels = self._truth.cancels if entry is original else counted
        if original.cancelled and not self._truth.are_gone(cancels[original.key]):
            self._fail(f"{entry} is {end} after it was cancelled")

    def _check_time(self, entry: Entry) -> None:
        """Checks that a message accepted after w was set back to a right clock is punctual."""
        plan, set_back_us = self._world.plan, self._set_back_us
        if not (set_back_us and is_calm_when_set_back(plan)):
            return
        if not are_clocks_right(plan, set_back_us / US_PER_MS, entry.visible_us / US_PER_MS):
            return
        if entry.acknowledged_us > set_back_us:
            due_us = (entry.due_ms - EPOCH_MS) * US_PER_MS
            late_us = entry.visible_us - max(due_us, entry.acknowledged_us)
            if late_us > LATE_US:
                self._fail(f"{entry} is delivered {late_us // US_PER_MS} ms after its due")

    def _dead(self, log_entry: LogEntry) -> None:
        """Checks a dead letter: it is the one end of its message, as a delivery would be."""
        if self._ingress.dead(log_entry) or self._halves.refused(log_entry):
            return
        ours = dict(log_entry.headers)
        key = key_in(ours, log_entry.topic)
        entry = self._book.of(key)
        if entry is None:
            self._fail(f"a dead letter that nobody sent: {ours}")
            return
        self._world.trace.add("kafka", "dead letter", f"m{entry.number}")
        entry.visible_us = self._world.scheduler.now_us
        self.delivered[key] += 1
        if self.delivered[key] > 1 and not self._truth.is_any_gone(self._truth.copies[key]):
            self._fail(f"{entry} is delivered twice, as a dead letter")
        self._check_not_cancelled(entry, "a dead letter")
        self._halves.dead(entry, ours["dw-dead-reason"] or b"")
        wrong = wrong_letter(self._world, entry, log_entry)
        if wrong is not None:
            self._fail(f"{entry}: {wrong}")

    def _outcome(self, log_entry: LogEntry) -> None:
        assert log_entry.value is not None
        report = json.loads(log_entry.value)
        outcome = report["outcome"]
        if outcome == "lost":
            wheel, first, last = WheelId.parse(report["wheel"]), report["seq"], report["last_seq"]
            frames = FrameSet([FrameRange(wheel, first, last)])
            if frames & self.lost:
                self._fail(f"{frames & self.lost} are reported lost twice")
            self.lost |= frames
            for seq in range(first, last + 1):
                self._world.trace.add("kafka", "reports lost", f"{wheel}/{seq}")
            return
        if outcome == "answered":
            half = MessageKey(bytes.fromhex(report["id"]), report["due_ms"], report["topic"])
            self._halves.told(half, report["answer"])
            return
        if self._halves.is_refused(report) or self._ingress.outcome(report):
            return
        key = MessageKey(bytes.fromhex(report["id"]), report["due_ms"], report["topic"])
        entry = self._book.of(key)
        if entry is None:
            self._fail(f"an outcome of what nobody sent: {report}")
            return
        self._world.trace.add("kafka", f"reports {outcome}", f"m{entry.number}")
        self.outcomes[key].append(outcome)
        self._halves.outcome(entry, outcome)
        if outcome == "duplicate":
            self._duplicates.append(entry)
        if outcome == "deferred" and not self._deferred[key]:
            self._fail(f"{entry} is said to be deferred, and is not")
        if outcome == "cancelled" and not (entry.cancel_tried or entry.reschedule_tried):
            self._fail(f"{entry} counts as cancelled, and nobody asked for it")

    def _check_duplicates(self) -> None:
        """Checks that what counts as a duplicate repeats a message that has its end.

        No loss excuses this: a frame that is given up is the original of nothing, also if it
        appears again.
        """
        for entry in self._duplicates:
            if not (self.is_ended(entry) or entry.key in self.rescheduled):
                self._fail(f"{entry} counts as a duplicate, and nothing has become of it")
        self._duplicates.clear()

    def _control(self, log_entry: LogEntry) -> None:
        before = self.control
        self.control = before.apply(log_entry.key, log_entry.value, log_entry.offset)
        kind, _, rest = (log_entry.key or b"").decode().partition("/")
        if kind == "leader":
            self._marked(int(rest), log_entry.transaction)
        elif kind == "ids":
            self._left_out(before, log_entry.transaction)
        elif kind == "wheel" and log_entry.key != NEEDS_KEY.encode():
            self._wheel(before, WheelId.parse(rest))
        elif kind == "reschedule":
            words = "settled" if log_entry.value is None else log_entry.value.decode()
            self._world.trace.add("kafka", "reschedule", rest, words)
        elif kind == "lost" and log_entry.value is not None:
            for frame in self.control.lost - before.lost:
                self._committed_lost(*frame)
        elif kind == "progress":
            self._check_epoch(log_entry.transaction)
            assert self.control.progress is not None
            node = log_entry.transaction.node
            if not self.leaders or self.leaders[-1][1] != node:
                self.leaders.append((self._world.scheduler.now_us, node))
            self._progress(before, self.control.progress)

    def _marked(self, index: int, transaction: Transaction) -> None:
        """Notes the candidacy that may commit: the one whose marks are the latest with every id.

        Those that are left out do not count. It remains so while another has overtaken it with only
        some ids: with those it is fenced.
        """
        self._marks[index] = transaction
        if index not in self.control.left_out.ids:
            self._elect()

    def _left_out(self, before: ControlState, transaction: Transaction) -> None:
        """Notes that a process goes on without ids with which it led, and nobody has since."""
        left = self.control.left_out.ids - before.left_out.ids
        marks = [self._marks[index] for index in left if index in self._marks]
        if all(
            self._world.kafka.candidacy_of(mark) == self._elected and mark.node == transaction.node
            for mark in marks
        ):
            self._elect()

    def _elect(self) -> None:
        counted = set(range(IDS)) - self.control.left_out.ids
        tokens = {mark.token for each, mark in self.control.leaders.items() if each in counted}
        if counted and counted <= self._marks.keys() and len(tokens) == 1:
            self._elected = self._world.kafka.candidacy_of(self._marks[min(counted)])

    def _check_epoch(self, transaction: Transaction) -> None:
        candidacy = self._world.kafka.candidacy_of(transaction)
        if candidacy != self._elected:
            self._fail(
                f"{transaction.node} commits with {transaction.transactional_id} epoch"
                f" {transaction.epoch} of candidacy {candidacy}, elected is {self._elected}, and"
                f" the leaders are {dict(self.control.leaders)}"
            )

    def _wheel(self, before: ControlState, wheel: WheelId) -> None:
        record, known = self.control.wheels.get(wheel), before.wheels.get(wheel)
        if record is None:
            if known is None:
                self._fail(f"{wheel} is unregistered and was not registered")
            elif known.closed_at is None:
                self._fail(f"{wheel} is unregistered and was not closed")
            self._unregistered.add(wheel)
            return
        if wheel in self._unregistered:
            self._fail(f"{wheel} comes back, though it was unregistered")
        if record.closed_at is None or (known is not None and known.closed_at is not None):
            return
        final_seq = self.closed_at[wheel] = record.closed_at
        self._world.trace.add("kafka", "closes", wheel, f"at {final_seq}")
        self._fail_all(wrong_closes(self._world, wheel))
        kept = (seq for seq in range(final_seq, 0, -1) if (wheel, seq) not in self.given_up)
        last_kept = next(kept, 0)
        holders = sum(
            self._truth.ever_had(storage, wheel) >= last_kept
            for storage in self.control.remaining(record).values()
        )
        if holders < min(record.min_insync, len(self.control.remaining(record))):
            self._fail(f"{wheel} is closed at {final_seq}, which {holders} alone ever held")
        cut = range(final_seq + 1, self._high_watermarks[wheel] + 1)
        left = [seq for seq in cut if not self._truth.are_gone([(wheel, seq)])]
        if left:
            self._fail(f"{wheel} is closed at {final_seq}; acknowledged were {left}")
        taken = 0 if self.control.progress is None else self.control.progress.seq(wheel)
        if taken > final_seq:
            self._fail(f"{wheel} is closed at {final_seq}; taken were {taken}")

    def _committed_lost(self, wheel: WheelId, seq: int) -> None:
        frame = self._truth.frames.get((wheel, seq))
        record = self.control.wheels.get(wheel)
        if record is None:
            self._fail(f"{wheel}/{seq} is committed to be lost, and {wheel} is not registered")
        if is_calm_beside(self._world.plan, *LOSE_NOTHING):
            self._fail(f"{wheel}/{seq} is committed to be lost, and no medium has lost anything")
        if frame is None or frame.gone or record is None:
            return
        holders = [
            name
            for name, storage in record.members.items()
            if (node := self._world.nodes.get(name)) is not None
            and node.storage == storage
            and _has(node, frame)
        ]
        if holders:
            self._fail(f"{wheel}/{seq} is committed to be lost; {holders} have it")
        elif any(
            frame.is_in_deleted_file(node.disk) or frame.is_behind_bad_sector(node.disk)
            for node in self._world.nodes.values()
        ):
            # Its origin had the file open, and continued in it after it was deleted, or wrote its
            # row into a page of the index in which another sector was bad by then.
            frame.gone = True

    def _progress(self, before: ControlState, after: Progress) -> None:
        if before.progress is not None:
            leaving = [w for w in before.progress.seqs if w not in self.control.wheels]
            for found in violations(before.progress, after, leaving):
                self._fail(f"progress: {found}")
            if after.set_backs > before.progress.set_backs:
                self._set_back_us = self._world.scheduler.now_us
                self._world.trace.add("kafka", "w is set back to", after.due_ms - EPOCH_MS)
        for wheel, seq in after.seqs.items():
            self._take(wheel, seq)
        while self._undone and self._undone[0][0] <= after.due_ms:
            _, key, name = heappop(self._undone)
            if not (self._is_key_done(key) or name in self.given_up):
                what = self._book.of(key) or str(key)
                self._fail(f"progress is ahead of {what} in {name[0]}/{name[1]}")
        if before.progress is None or after.floor > before.progress.floor:
            for slot in sorted(slot for slot in self._unfinished if slot < after.floor):
                for entry in self._unfinished.pop(slot):
                    self._finished(entry)

    def _take(self, wheel: WheelId, upto: int) -> None:
        if upto > self._taken[wheel]:
            self._look_for(wheel, upto, *self._world.nodes.values())
        for seq in range(self._taken[wheel] + 1, upto + 1):
            frame = self._truth.frames.get((wheel, seq))
            if frame is None:
                if (wheel, seq) not in self.given_up:
                    self._fail(f"V has {wheel}/{seq}, which nobody wrote")
            elif frame.kind is Kind.MESSAGES:
                for key in frame.keys:
                    heappush(self._undone, (key.due_ms, key, (wheel, seq)))
        self._taken[wheel] = max(upto, self._taken[wheel])

    def _finished(self, entry: Entry) -> None:
        """Checks an acknowledged message below the floor."""
        if entry.key in self.rescheduled:
            return  # its end is another message's
        if not (self.is_ended(entry) or self.is_excused(entry.key)):
            self._fail(f"floor {self.floor} is above {entry}")

    # --- what is known of a message

    def is_acknowledged(self, name: FrameName) -> bool:
        """Whether W members held a frame when its origin acknowledged it."""
        wheel, seq = name
        return seq <= self._high_watermarks[wheel]

    def _is_key_done(self, key: Key) -> bool:
        entry = self._book.of(key)
        return self._ingress.is_done(key) if entry is None else self.is_ended(entry)

    def is_ended(self, entry: Entry) -> bool:
        """Whether something has become of a message at this due."""
        ends = {"cancelled", "asked", "committed", "deferred"}
        return bool(self.delivered[entry.key]) or not ends.isdisjoint(self.outcomes[entry.key])

    def is_excused(self, key: Key) -> bool:
        """Whether no disk has any copy of it any more."""
        return self._truth.are_gone(self._truth.copies[key])

    def waiting(self, due_ms: int) -> Iterator[Entry]:
        """Yields acknowledged messages due before that have no end, lost ones included."""
        for entry in self._book.entries.values():
            is_taken = entry.fate is Fate.ACKNOWLEDGED and entry.due_ms < due_ms
            if is_taken and not self._has_end(entry):
                yield entry

    def is_finished(self, entry: Entry) -> bool:
        """Whether an acknowledged message has its end, or cannot have one before long."""
        return self._has_end(entry) or self.is_excused(entry.key) or self._is_far_ahead(entry)

    def _is_far_ahead(self, entry: Entry) -> bool:
        """Whether a rescheduled message was put off by clocks that were far ahead.

        It comes when the clocks have reached that.
        """
        if entry.key not in self.rescheduled:
            return False
        slots = [key.due_ms // 1000 for key in self._truth.copies if key.at(0) == entry.key.at(0)]
        return any(slot > self.last_slot for slot in slots)

    @property
    def last_slot(self) -> int:
        """The last second within the span; only clocks that were ahead put anything beyond."""
        return true_wall_ms(self._world.scheduler) // 1000 + self._world.settings.span_s

    def _has_end(self, entry: Entry) -> bool:
        """Whether a rescheduled message has its end at its new due, and nowhere else."""
        if entry.key not in self.rescheduled:
            return self.is_ended(entry)
        return bool(self.deliveries(entry)) or self.is_any_gone(entry)

    def check_at_the_end(self) -> None:
        """Checks the drained cluster: every message has its one end, and losses are reported."""
        for entry in self._book.entries.values():
            if entry.fate is Fate.REFUSED and self._truth.copies[entry.key]:
                self._fail(f"{entry} was written, and its caller was told that it is refused")
            self._check_told(entry)
            if entry.fate is not Fate.ACKNOWLEDGED or self._has_end(entry):
                continue
            if self._is_far_ahead(entry):
                continue
            copies = self._truth.copies[entry.key]
            if not self.is_excused(entry.key):
                self._fail(f"{entry} was never delivered")
            for wheel, seq in copies:
                if seq <= self.closed_at.get(wheel, seq) and (wheel, seq) not in self.lost:
                    self._fail(f"{entry} went with {wheel}/{seq}, and that was never reported")
        self._ingress.check_at_the_end()
        self._halves.check_at_the_end()
        self._fail_all(wrong_candidacies(self._world))
        self._fail_all(held_up(self._world))
        self._fail_all(held_up_by_media(self._world))
        for node in self._world.living():
            self._check_copies(node)
            assert node.server is not None
            if node.server.driver.refusal is MemberRefusal.NOT_ENOUGH_REPLICAS:
                self._fail(f"{node.name} still refuses messages, and nothing is wrong any more")

    def _check_told(self, entry: Entry) -> None:
        """Checks that a rescheduled message which went with a frame was reported with one."""
        if entry.fate is not Fate.ACKNOWLEDGED or entry.key not in self.rescheduled:
            return
        family = self._book.family(entry)
        copies = {name for each in family for name in self._truth.copies[each.key]}
        last = (each for each in family if each.key not in self.rescheduled)
        is_ended = bool(self.deliveries(entry)) or any(map(self.is_ended, last))
        is_told = is_ended or any(name in self.lost for name in copies)
        if self._truth.is_any_gone(copies) and not is_told:
            self._fail(f"{entry} went with one of {sorted(copies)}, and that was never reported")

    def _check_copies(self, node: SimNode) -> None:
        for wheel in _wheels(node):
            self._check_again(node, wheel)

    def _check_again(self, node: SimNode, wheel: WheelId) -> None:
        try:
            self._truth.check_again(node.disk, wheel)
        except RewrittenError as error:
            self._fail(str(error))

    def _fail_all(self, found: Iterable[str]) -> None:
        for what in found:
            self._fail(what)

    def _fail(self, what: str) -> None:
        self._world.violation(what)


def _has(node: SimNode, frame: FrameTruth) -> bool:
    # Rows are written again from the frames: those are not lost with them.
    return frame.is_on(node.disk, with_row=False)


def _wheels(node: SimNode) -> list[WheelId]:
    """The wheels of which a node has a folder."""
    return [WheelId.parse(name) for name in node.disk.list_quietly(layout.wheels_folder(node.data))]


def _own_wheels(node: SimNode) -> list[WheelId]:
    return [wheel for wheel in _wheels(node) if wheel.node == node.name]


def _is_mark(entry: LogEntry) -> bool:
    return entry.key is not None and entry.key.startswith(b"leader/")
