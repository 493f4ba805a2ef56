"""Every drill reaches its situation, and nothing goes wrong there.

A push has one drill of each interleaving that broke a draft, and those that show several mutants:
what only one fault would reach, and what computes longest, waits for a night. After a change of the
protocol run all of them, ``DELAYWHEEL_HYPOTHESIS=long``; ``scripts/sim --drills --seeds 2..9`` does
at other times.
"""

import re
from collections import Counter, deque
from collections.abc import Iterator
from itertools import takewhile

import pytest

from sim.drills.catalogue import DRILLS
from sim.mutants.catalogue import MUTANTS
from sim.nodes.world import World
from support.process.night import NIGHT

INTERLEAVINGS = {
    "1": ("candidates",),
    "2": ("slow_cancel", "late_cancel"),
    "3": ("forgetful",),
    "4": ("third_party",),
    "5": ("crash_behind", "wiped_behind"),
    "5a": ("old_answers", "old_boots"),
    "5b": ("empty_disk",),
    "6": ("power_cut", "lone"),
    "7": ("old_names",),
    "8": ("more_members",),
    "9": ("deaf_spare", "slow_mirrors"),
    "10": ("spare_after_a_step",),
    "11": ("quick_restarts", "left_behind"),
    "12": ("long_absence",),
    "13": ("sent_fill", "last_frames"),
    "14": ("without_kafka", "deaf_leader"),
    "15": ("through_another",),
    "16": ("dead_server",),
    "17": ("clock_ahead", "leader_ahead"),
    "18": ("slow_commits",),
    "19": ("one_millisecond",),
    "20": ("repeated_ends",),
    "21": ("new_leader",),
    "22": ("first_leader",),
}
"""What once broke a draft of the protocol: the drills name the danger and what must save us."""

FOUND = {
    "same_ids_for_other_topics",
    "deferred_by_several_leaders",
    "one_partition_away",
    "patience_ends",
    "cancel_beside_messages",
    "crashed_repair",
    "many_cancels",
    "overtaken_cancel",
    "other_dues",
    "other_dues_without_rows",
    "passed_dues",
    "unreadable_marks",
    "unreadable_marks_elsewhere",
    "unreadable_release",
    "unreadable_original",
    "cancel_or_other_due",
    "self_fenced",
    "throttled",
    "slow_mirror",
    "nobody_left",
    "exchanged_in_turn",
    "older_copy",
    "stopped_after_a_replacement",
    "taken_out",
    "sent_again",
    "bad_copy",
    "bad_sectors",
    "deleted_slot",
    "deleted_copy",
    "deleted_segments",
    "closed_while_it_is_swept",
    "deleted_open",
    "row_and_file",
    "unheard_of",
    "accepted_during_a_look",
    "unverified_answer",
    "unverified_leader",
    "long_done",
    "torn_behind_a_loss",
    "full_disk",
    "after_a_term",
    "clock_wrong_at_start",
    "clock_wrong_at_a_restart",
    "slow_ends",
    "moving_leaders",
    "unanswered_ends",
    "long_cut_off",
    "lost_end",
    "many_topics",
    "one_topic_after_another",
    "silent_topics",
    "answers_to_all",
    "long_asked",
    "cancelled_in_trouble",
    "one_silent_topic",
    "silent_in_a_later_step",
    "late_after_an_outage",
    "shrunk_at_a_due",
    "one_silent_partition",
    "refused_outcomes",
    "compacted_letters",
    "unread_for_long",
    "mended_meanwhile",
    "half_a_group",
    "switched_flush",
    "unreadable_alone",
    "unreadable_leader",
    "unreadable_rows_of_the_past",
    "segment_gone_alone",
    "segment_gone_unreadable",
    "zeroed_index_alone",
    "zeroed_index_behind_a_gap",
    "counted_while_unreadable",
    "restored_later",
    "worn_rows",
    "worn_rows_alone",
    "unwritable_copy",
    "refused_page",
    "undeletable_files",
    "days_ahead",
    "corrected_alone",
    "disputed",
    "missing_for_a_moment",
    "expired_meanwhile",
    "expired_by_another_header",
    "slow_files",
    "slow_starts",
    "set_back",
    "set_back_and_crash",
    "set_back_in_a_millisecond",
    "set_back_short",
    "set_back_twice",
    "halves_and_words",
    "halves_answered",
    "halves_beyond_v",
    "halves_by_records",
    "halves_released_late",
    "halves_unasked",
    "not_copied_while_ahead",
}
"""What the simulation found beyond these."""

INGRESS = {
    "announced_alone",
    "handed_over_alone",
    "handed_over_in_vain",
    "handed_over_late",
    "answered_alone",
    "answered_late",
    "settled_unheard",
    "unanswered",
    "hand_over_cut",
    "long_unread",
    "out_of_reach",
    "floor_waits",
    "set_back_ingress",
    "unknown_ends",
    "gaps",
    "deleted_unread",
    "recreated",
    "recreated_and_filled",
    "cut_off",
    "cut_off_unread",
    "cut_off_and_filled",
    "said_twice",
    "held_up",
}
"""Crashes between the steps of accepting ingress records, and topic faults."""


LONG = {
    "after_a_term",
    "answers_to_all",
    "closed_while_it_is_swept",
    "compacted_letters",
    "cut_off",
    "cut_off_and_filled",
    "cut_off_unread",
    "deferred_by_several_leaders",
    "deleted_unread",
    "exchanged_in_turn",
    "full_disk",
    "halves_and_words",
    "halves_by_records",
    "halves_unasked",
    "hand_over_cut",
    "held_up",
    "late_after_an_outage",
    "long_asked",
    "long_cut_off",
    "lost_end",
    "mended_meanwhile",
    "missing_for_a_moment",
    "moving_leaders",
    "one_silent_partition",
    "one_topic_after_another",
    "overtaken_cancel",
    "recreated",
    "recreated_and_filled",
    "refused_outcomes",
    "set_back_and_crash",
    "set_back_ingress",
    "set_back_short",
    "set_back_twice",
    "shrunk_at_a_due",
    "silent_in_a_later_step",
    "silent_topics",
    "slow_files",
    "unanswered_ends",
    "undeletable_files",
    "unreadable_original",
    "unreadable_rows_of_the_past",
}
"""More than 3 CPU s each, of dangers that shorter ones show too."""
SHOWN = Counter(name for mutant in MUTANTS.values() for name in set(mutant.profiles))
"""How many faults each of them shows."""
PUSHED = {first for first, *_ in INTERLEAVINGS.values()} | {
    name for name in DRILLS.keys() - LONG if SHOWN[name] > 1
}
RUN = DRILLS.keys() if NIGHT else PUSHED


@pytest.mark.parametrize("name", sorted(RUN))
def test_a_drill_leads_where_it_should(name: str) -> None:
    world = World(DRILLS[name].plan(1))
    world.trace._entries = deque()  # all of them, not the last ones
    assert not world.run().violations
    lines = before_healing(world)
    for what in DRILLS[name].reaches:
        assert any(re.search(what, line) for line in lines), what
    if name == "throttled":  # its leader keeps its term
        assert any("epoch 0" in line for line in before_healing(world))
        assert not any(re.search(r"init .* epoch 1", line) for line in before_healing(world))


def before_healing(world: World) -> Iterator[str]:
    return takewhile(lambda line: "everything heals" not in line, world.trace.lines())


def test_every_interleaving_has_its_drill() -> None:
    drills = {drill for drills in INTERLEAVINGS.values() for drill in drills}
    assert drills | FOUND | INGRESS == DRILLS.keys()
    assert len(INTERLEAVINGS) == 24
    assert LONG <= FOUND | INGRESS
