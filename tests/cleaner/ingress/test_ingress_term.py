"""A leader reads ingress topics: what its transactions carry, and what it hands over when."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from delaywheel import ingress
from delaywheel.identity import WheelId
from delaywheel.record_headers import OMITTED_HEADER
from delaywheel.seqset import SeqSet
from delaywheel_replica.cleaner.delivery.dead_letters import Hold, Plan, condemn
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.cleaner.ingress.searching import AGAIN_S, LASTING_S
from delaywheel_replica.cleaner.ingress.term import FAULT_KEPT_S
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.leader.halves import KNOWN_SINCE
from delaywheel_replica.core.protocol.control import IngressRecord, ingress_record
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from support.cleaner.committing import AllGoes
from support.cleaner.ingress_site import AT, NAMES, NOW_MS, TOPIC, Site, asked
from support.due.wheels import Sent, Wheels

OTHER = "other", 0

NOW = NOW_MS // 1000
BESIDE = (TOPIC, 1)


def test_the_group_comes_to_show_the_last_offsets(site: Site) -> None:
    for _ in range(2):  # the second one too soon after the first
        site.topics.send(*asked(0))
        site.run_once()
    assert site.offsets[AT] == 2
    assert not site.topics.group_offsets.get(AT)
    site.pass_ms(1_000)
    site.take_in()
    assert site.topics.group_offsets[AT] == 2
    site.topics.group_offsets = {}  # it did not arrive
    site.pass_ms(30_000)
    site.take_in()
    assert site.topics.group_offsets[AT] == 2


def test_what_a_new_topic_takes_is_said_at_once(wheels: Wheels) -> None:
    """Beside its offsets, though there are none to move: consumers ask for it when they begin."""
    site = Site(wheels)
    site.lead("a")
    site.take_in()
    site.topics.make()
    for _ in range(10):
        site.pass_ms(1_000)
        site.take_in()
    assert site.topics.group_offsets[AT] == 0
    site.close()


class TakesNoLetters(AllGoes):
    """The halves topic takes nothing: what is for it becomes a dead letter."""

    def plan(self, rows: DueRows, ahead: object = None) -> Plan:
        del ahead
        is_letter = np.array([message.topic == NAMES.halves for message in rows], np.bool_)
        return Plan(rows.take(~is_letter), [condemn(m, "bad") for m in rows.take(is_letter)])


def test_a_question_about_a_half_is_asked_whatever_is_thought_of_its_topic(wheels: Wheels) -> None:
    """As a dead letter it would reach no group, and it does not expire."""
    site = Site(wheels, dead_letters=TakesNoLetters())
    site.topics.make()
    site.settings = replace(site.settings, rules=replace(site.settings.rules, halves=True))
    site.state = replace(site.state, needs=KNOWN_SINCE)
    site.lead("a")
    half = [("dw-id", bytes(16)), ("dw-deliver-at", b"%d" % (NOW_MS - 90_000))]
    site.topics.send(("dw-topic", b"orders"), ("ttl", b"1"), *half, ("dw-half", b"shop"))
    site.run_once()
    (letter,) = site.delivered()
    assert letter.topic == NAMES.halves
    names = ["ttl", "dw-half", "dw-half-topic", "dw-half-deliver-at"]
    assert [name for name, _ in letter.headers[:4]] == names
    assert (site.offsets[AT], site.written_to(NAMES.dead)) == (1, [])
    counters = site.forwarder.counters
    assert (counters["halves_asked"], counters["forwarded"]) == (1, 0)
    site.close()


def test_halves_that_wait_for_all_nodes_to_know_them_are_a_fault(site: Site) -> None:
    """With all behind them, perhaps for as long as a node is away: somebody has to hear of it."""
    site.settings = replace(site.settings, rules=replace(site.settings.rules, halves=True))
    site.lead("a")
    site.topics.send(*asked(3_000))
    half = [("dw-id", bytes(16)), ("dw-deliver-at", b"%d" % (NOW_MS + 9_000))]
    site.topics.send(("dw-topic", b"orders"), *half, ("dw-half", b"shop"))
    for needs in (KNOWN_SINCE - 1, KNOWN_SINCE):
        site.state = site.forwarder.state = replace(site.forwarder.state, needs=needs)
        site.pass_ms(100)
        site.run_once()
        if site.server is not None:
            site.server.answer(RecordAnswer.HELD)
        site.run_once()
        status = site.ingress.status()
        assert status is not None
        waits = [f"{AT[0]}/0 waits with half messages" in fault for fault in status.faults]
        assert waits == [True] * (needs < KNOWN_SINCE)


def takes_halves_of_two_topics(wheels: Wheels) -> Site:
    """The cluster's own topic is the one through which groups answer."""
    site = Site(wheels)
    site.topics.make()
    site.topics.make(OTHER[0], partitions=1, id_="another")
    rules = replace(site.settings.rules, halves=True)
    site.settings = replace(site.settings, rules=rules, topics=frozenset([TOPIC, OTHER[0]]))
    site.lead("a")
    return site


@pytest.mark.parametrize("trouble", ["faults", "refuses"])
@pytest.mark.parametrize("needs", [KNOWN_SINCE - 1, KNOWN_SINCE])
def test_a_half_whose_answer_would_not_be_heard_keeps_nothing_waiting(
    wheels: Wheels, trouble: str, needs: int
) -> None:
    """Through another topic it waited, with all behind it, until the cluster's own was read."""
    site = takes_halves_of_two_topics(wheels)
    site.state = site.forwarder.state = replace(site.forwarder.state, needs=needs)
    setattr(site.topics, trouble, {TOPIC: "grant Read"})
    site.take_in()
    site.topics.refuses = None  # as Kafka's client says it once
    site.pass_ms(round(1000 * LASTING_S))
    half = [("dw-id", bytes(16)), ("dw-deliver-at", b"%d" % (NOW_MS + 19_000))]
    site.topics.send(("dw-topic", b"orders"), *half, ("dw-half", b"shop"), at=OTHER)
    site.topics.send(*asked(), at=OTHER)
    site.run_until_idle()
    assert len(site.delivered()) == 1
    (letter,) = site.written_to(NAMES.dead)
    headers = dict(letter.headers)
    assert headers["dw-dead-reason"] == b"HALVES_UNAVAILABLE"
    assert b"grant Read" in (headers["dw-dead-detail"] or b"")
    status = site.ingress.status()
    assert status is not None
    assert not [fault for fault in status.faults if "waits with half messages" in fault]
    site.topics.faults = {}
    site.pass_ms(round(FAULT_KEPT_S * 1000))
    site.run_until_idle()
    assert site.ingress.hears_answers
    assert site.ingress.answers_objection is None
    site.close()


def test_what_passes_by_itself_refuses_no_halves(wheels: Wheels) -> None:
    """Brokers that do not know a new topic yet, a controller that moves."""
    site = takes_halves_of_two_topics(wheels)
    for fault in ("brokers do not know it yet", "not the controller"):
        site.topics.faults = {TOPIC: fault}
        site.pass_ms(1_000)
        site.take_in()
        assert any(fault in each for each in site.ingress.faults)
        assert site.ingress.answers_objection is None
    site.topics.faults = {}
    site.pass_ms(1_000)
    site.take_in()
    site.topics.faults = {TOPIC: "it is compacted"}
    site.pass_ms(round(1000 * LASTING_S))
    site.take_in()
    assert site.ingress.answers_objection is None
    site.pass_ms(round(1000 * LASTING_S))
    site.take_in()
    assert "compacted" in (site.ingress.answers_objection or "")
    site.close()


def test_what_is_wrong_with_another_topic_refuses_no_halves(wheels: Wheels) -> None:
    site = takes_halves_of_two_topics(wheels)
    site.topics.refuses = {OTHER[0]: "grant Read"}
    site.take_in()
    site.topics.faults = {OTHER[0]: "it is compacted"}
    site.pass_ms(round(1000 * AGAIN_S))
    site.take_in()
    assert len(site.ingress.faults) == 2
    assert site.ingress.answers_objection is None
    site.close()


def test_halves_are_refused_once_kafka_has_not_answered_for_long(wheels: Wheels) -> None:
    site = takes_halves_of_two_topics(wheels)
    site.topics.is_away = True
    site.take_in()
    site.pass_ms(round(1000 * LASTING_S) - 1)
    site.take_in()
    assert site.ingress.answers_objection is None
    site.pass_ms(1)
    assert "no answer" in (site.ingress.answers_objection or "")
    site.topics.is_away = False
    site.pass_ms(1_000)
    site.take_in()
    assert site.ingress.answers_objection is None
    site.close()


def test_where_halves_are_off_no_answer_is_missed(wheels: Wheels) -> None:
    site = Site(wheels)
    site.topics.faults = {TOPIC: "it is compacted"}
    site.lead("a")
    site.take_in()
    assert site.ingress.faults
    assert site.ingress.answers_objection is None
    site.close()


def test_what_a_group_has_answered_is_an_outcome_once(site: Site) -> None:
    due_ms = NOW_MS - 90_000
    half = ("dw-topic", b"orders"), ("dw-id", bytes(16)), ("dw-deliver-at", b"%d" % due_ms)
    places = [
        site.topics.send(("dw-half-answer", answer), *half)
        for answer in (b"undecided", b"rolled-back")
    ]
    site.run_once()
    site.run_once()
    told = [json.loads(each.value or b"") for each in site.written_to(NAMES.outcomes)]
    assert told == [
        {
            "outcome": "answered",
            "answer": answer,
            "topic": "orders",
            "id": "00" * 16,
            "due_ms": due_ms,
            "origin": str(place),
        }
        for answer, place in zip(("undecided", "rolled-back"), places, strict=True)
    ]
    assert {each.key for each in site.written_to(NAMES.outcomes)} == {bytes(16)}
    assert (site.offsets[AT], site.handed, site.delivered()) == (2, [], [])
    counters = site.forwarder.counters
    assert (counters["halves_answered_undecided"], counters["halves_answered_rolled_back"]) == (
        1,
        1,
    )


@pytest.mark.parametrize(
    ("value_bytes", "header_bytes", "key_bytes", "left"),
    [
        (3_000, 10, 10, ("v", "h", "k")),
        (5_000, 10, 10, ("h", "k")),
        (10, 5_000, 10, ("k",)),
        (10, 10, 5_000, ()),
    ],
)
def test_a_letter_that_is_too_large_is_reported_without_its_content(
    site: Site, value_bytes: int, header_bytes: int, key_bytes: int, left: tuple[str, ...]
) -> None:
    """Letters that the dead-letter topic does not take must not stop anything."""
    site.topics.send(
        *asked(0, "orders", ("h", bytes(header_bytes))), value=bytes(value_bytes),
        key=bytes(key_bytes),
    )  # fmt: skip
    site.run_once()
    (letter,) = site.written_to(NAMES.dead)
    headers = dict(letter.headers)
    assert headers["dw-dead-reason"] == b"MESSAGE_TOO_LARGE"
    has = (("v", bool(letter.value)), ("h", "h" in headers), ("k", bool(letter.key)))
    assert tuple(name for name, there in has if there) == left
    assert (OMITTED_HEADER in headers) is (len(left) < 3)
    assert site.offsets[AT] == 1


def test_letters_are_sent_before_they_are_more_than_their_topic_takes_at_once(site: Site) -> None:
    """The client would make one batch of them, which Kafka refuses each time."""
    for _ in range(4):
        site.topics.send(("dw-oh", b""), value=bytes(1_500))
    site.run_once()
    assert len(site.written_to(NAMES.dead)) == 4
    assert site.producers.flushes == 1


def test_a_message_without_a_server_waits_and_is_handed_over_once_there_is_one(site: Site) -> None:
    site.has_server = False
    site.topics.send(*asked(5_000))
    site.run_once()
    site.has_server = True
    assert site.handed == []
    site.pass_ms(1_000)
    site.take_in()
    assert site.handed == [0]


def test_what_is_handed_over_is_left_out_of_what_was_planned_before(site: Site) -> None:
    """It was due, and the server had not taken it; now it may."""
    site.topics.send(*asked(1_000))
    site.run_once()
    assert site.server is not None
    site.server.answer(RecordAnswer.NOT_NOW)
    site.take_in()
    site.pass_ms(1_000)
    planned = site.plan()
    assert planned is not None
    assert len(planned.rows) == 1
    site.take_in()
    assert site.handed == [0]
    planned = site.plan()
    assert planned is not None
    assert len(planned.rows) == 0


def test_a_transaction_without_room_is_not_a_full_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While messages are held back, idle commits would double the next transaction each time."""
    monkeypatch.setattr(AllGoes, "plan", lambda *_: Hold("not yet"))
    site.run_once()
    planned = site.plan()
    assert site.forwarder.held == "not yet"
    assert planned is not None
    assert planned.step is None
    assert not planned.taken.is_full


def test_a_larger_record_than_there_is_room_for_is_handed_over_alone(site: Site) -> None:
    site.settings = replace(
        site.settings, rules=replace(site.settings.rules, max_message_bytes=10_000)
    )
    site.lead("a")
    for _ in range(2):
        site.topics.send(*asked(5_000), value=bytes(5_000))
    site.topics.send(*asked(5_000))
    site.run_once()
    assert site.server is not None
    site.server.answer(RecordAnswer.HELD)
    site.server.room_bytes = 1_000
    for _ in range(2):
        site.topics.send(*asked(5_000), value=bytes(5_000))
    site.run_once()
    assert len(site.server.waiting) == 1
    site.take_in()
    assert len(site.server.waiting) == 1
    site.server.answer(RecordAnswer.HELD)
    site.take_in()
    assert len(site.server.waiting) == 1


def test_rows_of_wheels_and_direct_ones_share_a_transaction(wheels: Wheels, site: Site) -> None:
    """At most half of it is for the ingress, by turns of the partitions."""
    for number in range(30):
        site.topics.send(*asked(), at=BESIDE if number % 2 else AT)
    sent = [Sent(NOW_MS - 500, number.to_bytes(16, "big")) for number in range(8)]
    wheels.write(WheelId("a", 1), sent, now_ms=NOW_MS - 600)
    first = site.run_once()
    assert first is not None
    kinds = [dict(record.headers)["dw-wheel"] for record in site.delivered()]
    assert kinds.count(b"c/ingress") == 4
    assert first.behind
    site.run_until_idle()
    assert len(site.delivered()) == 38
    assert all(count == 1 for count in site.out().values())


def test_without_topics_nothing_is_read_but_what_was_announced(site: Site) -> None:
    site.settings = replace(site.settings, topics=frozenset())
    site.lead("a")
    site.topics.send(*asked(2_000))
    site.topics.send(*asked(2_000))
    assert site.run_once() is None
    assert (site.topics.readers, site.ingress.status()) == (0, None)
    announced = IngressRecord("id", 0, SeqSet.of([0]), {})
    site.state = site.state.apply_all([ingress_record(AT, announced)])
    site.lead("a")
    site.take_in()
    assert site.topics.asked_for[-1] == {TOPIC}
    assert site.server is not None
    site.server.answer(RecordAnswer.HELD)
    site.run_once()
    site.transact()
    site.pass_ms(3_000)
    site.run_until_idle()
    assert (len(site.delivered()), site.offsets[AT]) == (1, 1)


def test_a_fault_of_a_search_goes_though_nothing_is_left_to_be_found(site: Site) -> None:
    """Kafka did not answer while the last announced record of a former topic was taken."""
    site.settings = replace(site.settings, topics=frozenset())
    site.topics.send(*asked(2_000))
    announced = IngressRecord("id", 0, SeqSet.of([0]), {})
    site.state = site.state.apply_all([ingress_record(AT, announced)])
    site.lead("a")
    site.take_in()
    site.topics.is_away = True
    site.pass_ms(11_000)
    site.take_in()
    (fault,) = site.ingress.faults
    assert fault == "the ingress topics cannot be found: no answer"
    assert site.server is not None
    site.server.answer(RecordAnswer.HELD)
    site.run_until_idle()
    assert site.offsets[AT] == 1
    site.topics.is_away = False
    site.pass_ms(11_000)
    for _ in range(2):
        site.take_in()
    assert site.ingress.faults == ()


def test_where_the_topic_is_switched_off_its_group_says_so(site: Site) -> None:
    """Beside the offset that consumers look at; or they would go on to write there."""
    for at, next_offset in ((AT, 7), ((TOPIC, 1), 0)):
        site.settings = replace(site.settings, topics=frozenset())
        committed = ingress_record(at, IngressRecord("id", 7))
        site.state = replace(site.state, ingress={}).apply_all([committed])
        site.topics.group_offsets = {}
        site.lead("a")
        site.take_in()
        assert (site.topics.group_offsets, site.topics.group_unread) == ({AT: next_offset}, {AT})
        assert site.topics.asked_for[-1:] == []
        assert (site.run_once(), site.ingress.status(), site.slot()) == (None, None, None)
        site.ingress.close()


def test_other_levels_count_for_what_comes_then(site: Site) -> None:
    site.topics.send((ingress.TOPIC, b"orders"), (ingress.LEVEL, b"1m"))
    site.run_once()
    assert site.server is not None
    site.server.answer(RecordAnswer.HELD)
    site.run_until_idle()
    site.transact()
    site.ingress.take_levels({"1m": 61_000})
    site.topics.send((ingress.TOPIC, b"orders"), (ingress.LEVEL, b"1m"))
    site.pass_ms(11_000)
    site.run_once()
    assert site.server is not None
    (handed,) = site.server.waiting
    assert handed.taken.slot == NOW + 61


def test_faults_are_reported_and_stop_nothing_else(site: Site) -> None:
    site.topics.faults = {"x": "the ingress topic x is compacted"}
    site.topics.refuses = "denied"
    site.take_in()
    faults = site.ingress.faults
    assert faults[0] == "the ingress topic x is compacted"
    assert "denied" in faults[1]
    assert site.transact().verdict is TransactionState.COMMITTED
    site.topics.faults, site.topics.refuses = {}, None
    site.topics.send(*asked())
    site.pass_ms(2_000)
    site.run_until_idle()
    assert (site.ingress.faults, len(site.delivered())) == ((), 1)


def test_lag_is_what_is_not_settled(site: Site) -> None:
    site.topics.send(*asked(5_000))
    site.topics.send(*asked(5_000), at=BESIDE)
    site.take_in()
    site.topics.send(*asked(5_000))
    status = site.ingress.status()
    assert status is not None
    assert (status.partitions, status.lag) == (2, 3)
    assert status.lags == {f"{TOPIC}/0": 2, f"{TOPIC}/1": 1}
    assert status.held_bytes > 0
    assert site.ingress.fileno == 99
    site.ingress.close()
    assert site.ingress.fileno is None
