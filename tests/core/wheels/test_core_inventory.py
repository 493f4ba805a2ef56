"""The wheels and frames that a node holds and reports."""

from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import MAX_MISSING, WheelHeartbeat
from delaywheel_replica.core.wheels.inventory import READ_AGAIN_FRAMES, READ_AGAIN_MS, Inventory
from support.core.member_world import held_of
from support.core.values import heartbeat, wheel_heartbeat

B1 = WheelId("b", 1)
B2 = WheelId("b", 2)


def holding(applied: int, missing: tuple[int, ...] = ()) -> Inventory:
    return Inventory({B1: held_of(B1, applied, missing=missing)})


def test_the_prefix_ends_before_the_first_frame_that_is_missing_and_not_lost() -> None:
    inventory = holding(5, (2, 4))
    assert inventory.prefix(B1) == 1
    inventory.lost(FrameSet.of({(B1, 2)}))
    assert inventory.prefix(B1) == 3
    inventory.lost(FrameSet.of({(B1, 2), (B1, 4), (B1, 6), (B1, 7)}))
    assert inventory.prefix(B1) == 7
    assert inventory.prefix(WheelId("c", 1)) == 0


def test_a_frame_that_could_not_be_read_is_missing_until_it_is_repaired() -> None:
    inventory = holding(5)
    inventory.unreadable(B1, SeqSet.of([3]))
    inventory.unreadable(B1, SeqSet.of([6]))
    inventory.put(held_of(B1, 6))
    assert inventory.heartbeats()[B1].missing == SeqSet.of([3])
    inventory.repaired(B1, SeqSet.of([3]), 0)
    inventory.put(held_of(B1, 6))
    assert inventory.heartbeats()[B1].missing == NO_SEQS


def test_what_lies_beyond_the_end_is_cut_with_its_marks() -> None:
    inventory = holding(5)
    inventory.unreadable(B1, SeqSet.of([4]))
    inventory.unreadable(B1, SeqSet.of([2]))
    inventory.put(held_of(B1, 3, final_seq=3))
    held = inventory.get(B1)
    assert held is not None
    assert held.missing == SeqSet.of([2])


def test_the_cleaners_word_may_be_older_than_the_repair() -> None:
    inventory = holding(5)
    bad = FrameSet.of({(B1, 3)})
    inventory.reported(bad, 1_000)
    assert inventory.heartbeats()[B1].missing == SeqSet.of([3])
    inventory.repaired(B1, SeqSet.of([3]), 1_100)
    inventory.put(held_of(B1, 5))
    inventory.reported(bad, 1_100 + READ_AGAIN_MS - 1)
    assert inventory.heartbeats()[B1].missing == NO_SEQS
    inventory.reported(bad, 1_100 + READ_AGAIN_MS)
    assert inventory.heartbeats()[B1].missing == SeqSet.of([3])


def test_what_no_leader_waits_for_any_more_is_taken_back_in_time() -> None:
    inventory = holding(5)
    inventory.unreadable(B1, SeqSet.of([2]))
    inventory.reported(FrameSet.of({(B1, 3), (B1, 6), (B2, 1)}), 1_000)
    assert inventory.heartbeats()[B1].missing == SeqSet.of([2, 3])
    inventory.reported(FrameSet.of({(B1, 4)}), 1_100)
    inventory.reported(NO_FRAMES, 1_100 + READ_AGAIN_MS - 1)
    assert inventory.heartbeats()[B1].missing == SeqSet.of([2, 3, 4])
    inventory.reported(NO_FRAMES, 1_100 + READ_AGAIN_MS)
    assert inventory.heartbeats()[B1].missing == SeqSet.of([2])


def test_missing_frames_are_read_again_ever_less_often_and_at_once_while_some_are_found() -> None:
    missing = SeqSet([(2, 3 + READ_AGAIN_FRAMES)])
    inventory = Inventory({B1: held_of(B1, 9_000, missing=missing)})
    looks = [ms for ms in range(0, 16_000, 100) if inventory.to_read_again(ms)]
    assert looks == [READ_AGAIN_MS, 3 * READ_AGAIN_MS, 7 * READ_AGAIN_MS]
    inventory.found_again(B1, NO_SEQS, 15_000)
    assert inventory.to_read_again(15_000) == {}
    found = missing.least(READ_AGAIN_FRAMES)
    inventory.found_again(B1, found, 15_000)
    inventory.put(held_of(B1, 9_000, missing=missing - found))
    assert inventory.to_read_again(15_000) == {B1: missing - found}


def test_of_several_words_the_greatest_counts() -> None:
    inventory = holding(5)
    first = replace(wheel_heartbeat(5, seal=(9, 3), ledger_seq=2), high_watermark=4)
    assert inventory.heard(heartbeat("b", wheels={B1: first}))
    weaker = replace(wheel_heartbeat(5, seal=(9, 4), ledger_seq=1), high_watermark=3)
    assert not inventory.heard(heartbeat("c", wheels={B1: weaker}))
    inventory.published(B1, 1)
    assert inventory.heartbeats()[B1] == WheelHeartbeat(5, 4, 9, 3, 2, 0)
    stronger = replace(wheel_heartbeat(5, seal=(9, 2), ledger_seq=5), high_watermark=5)
    assert inventory.heard(heartbeat("c", wheels={B1: stronger}))
    assert inventory.heartbeats()[B1] == WheelHeartbeat(5, 5, 9, 2, 5, 0)


def test_what_was_reported_is_never_changed_afterwards() -> None:
    inventory = holding(5)
    reported = inventory.heartbeats()
    before = dict(reported)
    inventory.put(held_of(B1, 6))
    inventory.deleted(B1)
    assert reported == before
    assert inventory.heartbeats() == {}


def test_a_beat_has_a_bounded_size() -> None:
    """Frames that are not reported as missing are held."""
    scattered = tuple(range(2, 400, 2))
    reported = holding(500, scattered).heartbeats()[B1].missing
    assert len(reported.spans) == MAX_MISSING
    assert reported.spans[-1] == (2 * MAX_MISSING, 398)
    assert reported - SeqSet.of(scattered) == SeqSet.of(range(2 * MAX_MISSING + 1, 398, 2))
