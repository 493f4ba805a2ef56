"""One run of three real nodes into which faults are seeded, each on separate messages.

=============  ====================================================================================
what           how
=============  ====================================================================================
lost           all nodes are killed while no leader forwards; frames are spoiled on all disks,
               cut short, or deleted with their file: the cluster finds out at the due, and reports
missing        likewise, but the last frame of a wheel is cut off with its row in the index: nobody
               can know
early, late,   such messages, written by hand in place of the service
changed
duplicated     a forwarded record, written again by hand
unexpected     a record with an id that was never accepted
ledger_gap     a file of the ledger deleted after all: one in the middle of a wheel, and the last
=============  ====================================================================================

Beside them all that is no fault: cancels, retries at another node, with the same content or with
another, dead letters, messages that wait, timestamps of the callers' own, records of somebody
else's; and a node that is killed before its ledger was published.
"""

from __future__ import annotations

import itertools
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.node import Node, send_signal
from support.kafka.read_committed import CommittedReader, create_topic, read_all
from support.seeded.books import INTERVAL_MS, Expected, Sent
from support.seeded.cuts import Place, cut_off, cut_short, delete_slot_file, place_of, spoil
from support.seeded.hand import Hand, accepted_at_ms_of, own_headers, sent_as
from support.services.trio import Trio, cancelled, seen_by, send

LATE_TOLERANCE_MS = 300_000
"""A busy machine must not make findings."""
HOUR_MS = 3_600_000
LONG_AGO_MS = 1_577_836_800_000
LATE_WINDOW_S = 10
"""What is over is forgotten soon: the run waits for that."""


class SeededRun:
    """The run; `play` plays it, and all its processes have ended when that returns.

    Attributes:
        names: of the cluster's own topics.
        topic: with the faults.
        clean_topic: without.
        ledger: where all nodes publish.
        began_ms: no due is earlier.
        expected: what the books must say.
        places: of messages that were cut out, by id: where they were.
        deleted: the ledger files that are deleted last.
    """

    def __init__(self, kafka: str, folder: Path, cluster_id: str) -> None:
        """Prepares; nothing runs yet."""
        self.kafka = kafka
        self.names = KafkaNames(cluster_id)
        self.topic = f"orders-{uuid.uuid4().hex[:8]}"
        self.clean_topic = f"clean-{uuid.uuid4().hex[:8]}"
        self.ledger = folder / "ledger"
        self.began_ms = 0
        self.expected = Expected()
        self.places: dict[bytes, Place] = {}
        self.deleted: list[Path] = []
        self._hand = Hand(kafka)
        self._trio = Trio(
            kafka,
            folder,
            cluster_id,
            late_window_s=LATE_WINDOW_S,
            ledger_uri=str(self.ledger),
        )
        self._accepted: Counter[bytes] = Counter()
        self._arriving: Counter[str] = Counter()
        self._outcomes = 0
        self._rows: dict[Path, Counter[bytes]] = {}

    def play(self) -> None:
        """Everything but the deletion of ledger files."""
        for topic in (self.topic, self.clean_topic):
            # Without bounds: else what has an old timestamp of its caller's goes at once.
            create_topic(self.kafka, topic, config={"retention.ms": "-1"})
        with self._trio:
            self._trio.wait_in_sync()
            self.began_ms = _now_ms()
            for topic in (self.topic, self.clean_topic):
                self._send_what_is_forwarded(topic)
                self._send_what_is_not(topic)
            self._send_for_ledger_files()
            self._await_kafka()
            self._write_by_hand()
            self._cut_from_dead_nodes()
            self._await_kafka()
            self._await_published(self._accepted)
            self._trio.wait("the floor passed all that is over", self._is_over)

    def delete_ledger_files(self) -> None:
        """The last fault: published rows are gone."""
        for path in self.deleted:
            path.unlink()

    # --- what is no fault

    def _send_what_is_forwarded(self, topic: str) -> None:
        """Sends to two nodes; some messages have their own timestamps."""
        for node in self._trio.nodes[:2]:
            rows = [self._row(topic, self._in(4_000 + 200 * n)) for n in range(20)]
            for row in rows[::4]:
                row.timestamp_ms = LONG_AGO_MS
            self._forwarded(self._send(node, *rows))

    def _send_what_is_not(self, topic: str) -> None:
        """Cancels, retries at another node, dead letters; and messages due after the run."""
        first, second, _ = self._trio.nodes
        (gone,) = self._send(first, self._row(topic, self._in(15_000)))
        outcome = self._trio.wait("it is answered", lambda: cancelled(second, gone.handle))
        assert outcome == pb.CANCEL_OUTCOME_CANCELLED
        self._reported(gone, "cancelled")
        for value in (b"once", b"twice"):
            row = self._row(topic, self._in(5_000))
            row.value = b"once"
            self._forwarded(self._send(first, row))
            row.value = value
            (again,) = self._send(second, row)
            self._outcomes += 1
            self.expected.count(again, accepted=1, duplicates_dropped=1)
            if value != b"once":
                self.expected.find("content_differs", again)
        ahead = self._row(topic, self._in(3_000))
        ahead.timestamp_ms = ahead.deliver_at_ms + 3 * 24 * HOUR_MS  # no topic takes that
        (letter,) = self._send(second, ahead)
        self._reported(letter, "dead")
        self.expected.find("dead_letter", letter)
        (waiting,) = self._send(second, self._row(topic, HOUR_MS // 2))
        self.expected.accepted(waiting, "pending")

    # --- faults

    def _send_for_ledger_files(self) -> None:
        """Four files of one wheel; the second and the last will be deleted."""
        for number in range(1, 5):
            rows = self._rows_of_a_second(self._in(2_500), 3)
            messages = self._send(self._trio.nodes[2], *rows)
            (path,) = self._await_published(Counter(message.id for message in messages))
            if number % 2:
                self._forwarded(messages)
            else:
                self.deleted.append(path)
                self._arriving[self.topic] += len(messages)

    def _write_by_hand(self) -> None:
        """A copy, a forgery, and records of others."""
        # The audit overlooks copies with a caller's own timestamp that lie before all others.
        record = next(
            each
            for each in read_all(self.kafka, self.topic, at_least=1)
            if each.key() == b"n1" and each.timestamp()[1] != LONG_AGO_MS
        )
        copied = sent_as(record)
        self._hand.write_again(record)
        self.expected.count(copied, duplicated=1)
        self.expected.find("duplicated", copied)
        forgery = replace(copied, id=uuid.uuid4().bytes)
        self._hand.write(self.topic, own_headers(forgery, accepted_at_ms_of(record)))
        self.expected.count(forgery, unexpected=1)
        self.expected.find("unexpected", forgery)
        self._hand.write(self.topic, [("trace", b"1")])

    def _cut_from_dead_nodes(self) -> None:
        """Acknowledged messages in the ledger are cut from all disks before their due.

        Of a wheel that a living node writes, that node has the newest frames in memory, too, and
        mends the others' copies with them.
        """
        first, second, _ = self._trio.nodes
        self._pause_forwarding()
        after_ms = self._in(3_000)
        groups = [
            self._send(first, *self._rows_of_a_second(after_ms + 1_000 * n, count))
            for n, count in enumerate((3, 3, 3, 7))
        ]
        *cut, vanished = (self._locate(group) for group in groups)
        self._await_published(Counter(message.id for message in itertools.chain(*groups)))
        self._kill_before_publication(second)
        for place, how in zip(cut, (spoil, cut_short, delete_slot_file), strict=True):
            how(self._folders, place)
            self._outcomes += 1
        cut_off(self._folders, vanished)
        for message in itertools.chain(*groups[:-1]):
            self.expected.accepted(message, "lost")
            self.expected.find("lost", message)
        self._replace_by_hand(groups[-1], vanished.accepted_at_ms)
        for node in self._trio.nodes:
            self._trio.start(node)
        self._trio.wait_accepting()

    def _pause_forwarding(self) -> None:
        for node in self._trio.nodes:
            send_signal(node.pids(["cleaner_pid"]), signal.SIGSTOP)

    def _kill_before_publication(self, last: Node) -> None:
        """Kills all nodes; of one of them rows are not published yet.

        No search is faster than a node that publishes every second: there is no place meanwhile.
        """
        aside = self.ledger.with_name("aside")
        self.ledger.rename(aside)
        self.ledger.touch()
        after_ms = self._in(3_000)
        messages = self._send(last, *(self._row(self.topic, after_ms + n) for n in range(5)))
        self._trio.kill(last)
        for node in self._trio.others(last):
            self._trio.kill(node)
        self.ledger.unlink()
        aside.rename(self.ledger)
        assert not self._published(Counter(message.id for message in messages))
        self._forwarded(messages)

    def _replace_by_hand(self, messages: list[Sent], accepted_at_ms: int) -> None:
        """Two of the messages stay missing, the others are written by hand, each wrongly."""
        early, late, other_due, no_due, no_id, *missing = messages
        for message in missing:
            self.expected.accepted(message, "missing")
            self.expected.find("missing", message)
        for message, kind, at_ms in (
            (early, "early", early.due_ms - 500),
            (late, "late", late.due_ms + LATE_TOLERANCE_MS + 1),
        ):
            self._hand.write(self.topic, own_headers(message, accepted_at_ms), at_ms=at_ms)
            self.expected.accepted(message, "forwarded")
            self.expected.count(message, **{kind: 1})
            self.expected.find(kind, message)
        moved = replace(other_due, due_ms=other_due.due_ms + 1)
        for message, headers in (
            (other_due, own_headers(moved, accepted_at_ms)),
            (no_due, [h for h in own_headers(no_due, accepted_at_ms) if h[0] != "dw-due"]),
            (no_id, [h for h in own_headers(no_id, accepted_at_ms) if h[0] != "dw-id"]),
        ):
            self._hand.write(self.topic, headers, at_ms=message.due_ms)
            self.expected.accepted(message, "forwarded")
            self.expected.find("changed", message)

    def _is_over(self) -> bool:
        """Whether the service is done with the run, except for messages due after it.

        It has forgotten wheels of which nothing waits: what the reconciliation knows of these, the
        ledger alone shows it.
        """
        seen = seen_by(self._trio.nodes[0])
        dues = [due_ms for _, due_ms in self.expected.buckets if due_ms < _now_ms()]
        is_past = seen.floor * 1000 > max(dues) + INTERVAL_MS
        return is_past and not {"n1.1", "n3.1"} & {row.wheel for row in seen.wheels}

    # --- how

    @property
    def _folders(self) -> list[Path]:
        return [node.data for node in self._trio.nodes]

    def _in(self, ms: int) -> int:
        """A time this far ahead, relative to the beginning."""
        return _now_ms() - self.began_ms + ms

    def _row(self, topic: str, after_ms: int) -> pb.DelayedMessage:
        due_ms = self.began_ms + after_ms
        return pb.DelayedMessage(topic=topic, id=uuid.uuid4().bytes, deliver_at_ms=due_ms)

    def _rows_of_a_second(self, after_ms: int, count: int) -> list[pb.DelayedMessage]:
        """Messages of one second, and so of one frame."""
        after_ms -= (self.began_ms + after_ms) % 1000
        return [self._row(self.topic, after_ms + n) for n in range(count)]

    def _send(self, node: Node, *rows: pb.DelayedMessage) -> list[Sent]:
        for row in rows:
            row.key = row.key or node.id.encode()
            self._accepted[row.id] += 1
        return [
            Sent(row.topic, row.id, row.deliver_at_ms, handle.partition(":")[0])
            for row, handle in zip(rows, send(node, *rows), strict=True)
        ]

    def _forwarded(self, messages: Iterable[Sent]) -> None:
        for message in messages:
            self._arriving[message.topic] += 1
            self.expected.accepted(message, "forwarded")

    def _reported(self, message: Sent, outcome: str) -> None:
        self._outcomes += 1
        self.expected.accepted(message, outcome)

    def _locate(self, messages: list[Sent]) -> Place:
        """The places of these messages, once every node has them."""
        wheel, id_ = messages[0].wheel, messages[0].id

        def places() -> set[Place | None]:
            return {place_of(folder, wheel, id_) for folder in self._folders}

        self._trio.wait("all nodes have it", lambda: None not in places())
        (place,) = places()
        assert place is not None
        self.places.update((message.id, place) for message in messages)
        return place

    def _await_kafka(self) -> None:
        """Returns when Kafka has everything expected so far."""
        wanted = self._arriving + self._hand.written
        wanted[self.names.outcomes] = self._outcomes
        for topic, count in wanted.items():
            with CommittedReader(self.kafka, topic) as reader:
                reader.wait_for(count, timeout_s=60)

    def _await_published(self, ids: Counter[bytes]) -> set[Path]:
        """Waits until rows with these ids are in the published ledger; returns the files."""
        self._trio.wait("it is published", lambda: self._published(ids) >= ids)
        return {path for path, found in self._rows.items() if found.keys() & ids.keys()}

    def _published(self, ids: Counter[bytes]) -> Counter[bytes]:
        for path in self.ledger.rglob("*.parquet"):
            if path not in self._rows:
                self._rows[path] = ids_in(path)
        found = sum(self._rows.values(), Counter[bytes]())
        return Counter({id_: count for id_, count in found.items() if id_ in ids})


def ids_in(path: Path) -> Counter[bytes]:
    """How often each id is in a file of the ledger."""
    return Counter(id_ for id_ in pq.read_table(path, columns=["id"])["id"].to_pylist() if id_)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
