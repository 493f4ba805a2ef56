"""A server that accepts no messages, as on a full disk: the floor moves, so that disks free up."""

from __future__ import annotations

from dataclasses import replace

from delaywheel import ingress
from delaywheel_replica.core.ingress.reading import Delayed
from delaywheel_replica.core.ingress.underway import RecordAnswer
from support.cleaner.ingress_site import AT, NOW_MS, Site, asked

NOW = NOW_MS // 1000


def run_for(site: Site, seconds: float) -> int:
    """Turns for this long, with a server that accepts only cancels; returns what it was handed."""
    handed = 0
    for _ in range(round(seconds * 20)):
        site.pass_ms(50)
        site.run_once()
        server = site.server
        while server is not None and server.waiting:
            is_message = isinstance(server.waiting[0].taken.request, Delayed)
            handed += server.answer(RecordAnswer.NOT_NOW if is_message else RecordAnswer.HELD, 1)
    return handed


def floor(site: Site) -> int:
    progress = site.forwarder.state.progress
    assert progress is not None
    return progress.floor


def test_the_floor_moves_on_while_a_due_record_waits_behind_one_that_is_not(site: Site) -> None:
    site.topics.send(*asked(3_000_000))
    site.topics.send(*asked(10_000))
    run_for(site, 200)
    site.transact()
    assert floor(site) > NOW + 10
    assert (site.offsets[AT], site.delivered()) == (0, [])
    run_for(site, 3)
    for _ in range(3):  # the server takes messages again
        site.pass_ms(2_000)
        site.run_once()
        if site.server is not None:
            site.server.answer(RecordAnswer.HELD)
    site.run_until_idle()
    site.transact()
    assert (site.offsets[AT], len(site.delivered())) == (2, 1)
    site.pass_ms(3_000_000)
    site.run_until_idle()
    assert list(site.out().values()) == [1, 1]


def test_few_records_are_handed_over_in_vain(site: Site) -> None:
    for _ in range(50):
        site.topics.send(*asked(3_000_000))
    run_for(site, 5)
    assert run_for(site, 10) <= 10
    assert floor(site) < NOW
    assert site.slot() is None or len(site.forwarder.state.ingress[AT].announced) == 1


def test_cancels_go_on_while_messages_are_refused(site: Site) -> None:
    site.topics.send(*asked(3_000_000))
    run_for(site, 3)
    due = ingress.DELIVER_AT, b"%d" % (NOW_MS + 60_000)
    cancel = (ingress.CANCEL, bytes(16)), due, (ingress.TOPIC, b"orders")
    site.topics.send(*cancel, at=(AT[0], 1))
    run_for(site, 3)
    site.transact()
    assert site.offsets[AT[0], 1] == 1


def test_a_server_that_never_says_is_a_fault_of_the_status(site: Site) -> None:
    site.topics.send(*asked(3_000_000))
    for _ in range(13):
        site.pass_ms(1_000)
        site.run_once()
        if site.server is not None and site.server.waiting:
            site.server.answer(RecordAnswer.UNKNOWN)
    status = site.ingress.status()
    assert status is not None
    assert [f"{AT[0]}/0/0: its log has the cause" in fault for fault in status.faults] == [True]


def test_a_short_refusal_takes_nothing_back(site: Site) -> None:
    site.topics.send(*asked(3_000_000))
    site.run_once()
    assert site.server is not None
    site.server.answer(RecordAnswer.NOT_NOW)
    site.take_in()
    site.pass_ms(900)
    site.transact()
    assert 0 in site.forwarder.state.ingress[AT].announced


def test_a_partition_that_is_stuck_stops_no_other(site: Site) -> None:
    site.settings = replace(
        site.settings, rules=replace(site.settings.rules, max_message_bytes=5 << 20)
    )
    site.lead("a")
    for _ in range(9):
        site.topics.send(*asked(3_000_000), value=bytes(4 << 20))
    site.run_once()
    site.topics.send(*asked(3_000_000))
    beside = AT[0], 1
    site.topics.send(*asked(0), at=beside)
    run_for(site, 3)
    assert (site.offsets[beside], site.offsets[AT]) == (1, 0)
    assert site.topics.partitions[AT[0]][0][-1].place.offset == 9
    status = site.ingress.status()
    assert status is not None
    assert status.lags == {f"{AT[0]}/0": 10, f"{AT[0]}/1": 0}
