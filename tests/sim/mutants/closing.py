"""Errors in fencing, recovering and closing, as far as the leader decides them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader import closing
from delaywheel_replica.core.leader.closing import Close, Closing, HoldersWanted
from delaywheel_replica.core.node.shared_state import Registry
from delaywheel_replica.core.protocol import control
from delaywheel_replica.core.protocol.control import (
    ControlRecord,
    ControlState,
    WheelRecord,
    required_answers,
)
from delaywheel_replica.core.protocol.frames import FrameRange
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, Promise
from delaywheel_replica.server.ledger.source import LedgerSource
from sim.mutants.mutant import Mutant, Patch, everywhere, instead
from sim.nodes.books import SimBooks


def least_answer() -> list[Patch]:
    real = closing.closing

    def at_the_least(
        wheel: WheelId,
        state: ControlState,
        answers: Collection[Promise],
        heartbeats: Mapping[str, Heartbeat],
        *,
        taken: int,
    ) -> Closing:
        least = min((a.applied.get(wheel, 0) for a in answers if a.covers(wheel)), default=0)
        cut = [replace(a, applied={**a.applied, wheel: least}) for a in answers]
        return real(wheel, state, cut, heartbeats, taken=taken)

    return [everywhere(real, at_the_least)]


def too_few_answers() -> list[Patch]:
    def one_less(record: WheelRecord) -> int:
        return max(1, required_answers(len(record.members), record.min_insync) - 1)

    return [instead(WheelRecord, "required_answers", property(one_less))]


def incomplete_members_count() -> list[Patch]:
    return [instead(Promise, "is_complete", lambda _self, _wheel: True)]


def closed_wheels_are_not_copied() -> list[Patch]:
    return [instead(Registry, "holders", lambda _self, record: record.members)]


def copies_do_not_count() -> list[Patch]:
    return [instead(ControlState, "holders", ControlState.remaining)]


def replaced_members_count() -> list[Patch]:
    real = closing.closing

    def with_all(
        wheel: WheelId,
        state: ControlState,
        answers: Collection[Promise],
        *rest: Any,
        taken: int,
    ) -> Closing:
        members = state.wheels[wheel].members
        counted = [replace(a, storage=members.get(a.node, a.storage)) for a in answers]
        return real(wheel, replace(state, nodes={}), counted, *rest, taken=taken)

    return [everywhere(real, with_all)]


def fills_before_they_are_committed() -> list[Patch]:
    sent: dict[WheelId, int] = {}

    def wanted(
        _state: ControlState, results: Mapping[WheelId, Closing]
    ) -> dict[WheelId, WheelRecord]:
        sent.clear()
        sent.update((w, r.final_seq) for w, r in results.items() if isinstance(r, HoldersWanted))
        return {}

    return [
        everywhere(closing.limits_wanted, wanted),
        everywhere(closing.committed_limits, lambda _state: dict(sent)),
    ]


def closes_what_too_few_hold() -> list[Patch]:
    real = closing.closing

    def at_once(*args: Any, taken: int) -> Closing:
        result = real(*args, taken=taken)
        return Close(result.final_seq) if isinstance(result, HoldersWanted) else result

    return [everywhere(real, at_once)]


def closes_what_is_named() -> list[Patch]:
    def is_left(state: ControlState, _wheel: WheelId, heartbeat: Heartbeat | None) -> bool:
        return heartbeat is not None and closing.is_registered(state, heartbeat)

    return [instead(closing, "_is_left", is_left)]


def end_before_v() -> list[Patch]:
    real = closing.closing

    def of_answers_alone(*args: Any, taken: int) -> Closing:
        del taken
        return real(*args, taken=0)

    return [everywhere(real, of_answers_alone)]


def records_a_range_too_long() -> list[Patch]:
    real = control.lost_record
    return [everywhere(real, lambda lost: real(lost._replace(last_seq=lost.last_seq + 1)))]


def records_a_range_too_short() -> list[Patch]:
    real = control.lost_record

    def without_the_last(lost: FrameRange) -> ControlRecord:
        return real(lost._replace(last_seq=max(lost.first_seq, lost.last_seq - 1)))

    return [everywhere(real, without_the_last)]


def published_is_forgotten() -> list[Patch]:
    return [
        instead(LedgerSource, "finished_to", lambda *_: 0),
        instead(SimBooks, "noted", lambda _: {}),
    ]


CLOSING = {
    "recovers to the least answer": Mutant(
        "T is the least of the answers",
        least_answer,
        "is closed at",
        ("left_behind",),
    ),
    "one answer too few": Mutant(
        "R - 1 members are enough to find the end",
        too_few_answers,
        "is closed at",
        ("left_behind",),
    ),
    "an incomplete member counts": Mutant(
        "what a member may have lost in a crash is not asked for",
        incomplete_members_count,
        "is closed at",
        ("crash_behind",),
    ),
    "a replaced member counts for closing": Mutant(
        "a member with an empty disk answers like any other",
        replaced_members_count,
        "is closed at",
        ("wiped_behind",),
    ),
    "closed wheels are not copied": Mutant(
        "a node whose disk was replaced fetches nothing of the wheels before",
        closed_wheels_are_not_copied,
        "disks were exchanged in turn",
        ("exchanged_in_turn",),
    ),
    "copies do not count": Mutant(
        "frames are lost that only a node with a replaced disk holds",
        copies_do_not_count,
        "disks were exchanged in turn|alone ever held|was never delivered",
        ("exchanged_in_turn",),
    ),
    "limits are sent before they are committed": Mutant(
        "members may fetch up to an end that another leader does not know of",
        fills_before_they_are_committed,
        "is closed at|acknowledges",
        ("sent_fill",),
    ),
    "closes what too few hold": Mutant(
        "T is committed although fewer than W members hold everything up to it",
        closes_what_too_few_hold,
        "alone ever held",
        ("last_frames",),
    ),
    "closes a wheel that is named": Mutant(
        "open wheel and spare count as left although their node's beat names them",
        closes_what_is_named,
        "nothing was done",
        ("first_leader",),
    ),
    "an end before V": Mutant(
        "T does not take account of what was forwarded",
        end_before_v,
        "taken were",
        ("lone",),
    ),
    "what was published is forgotten": Mutant(
        "no node notes what was published, and nothing proves it once all were restarted",
        published_is_forgotten,
        "committed to be lost|not drained|are reported lost",
        ("stopped_after_a_replacement",),
    ),
    "a lost range is one too long": Mutant(
        "the frame behind those that are lost is recorded with them",
        records_a_range_too_long,
        "is above m|was never delivered|committed to be lost|not drained",
        ("torn_behind_a_loss",),
    ),
    "a lost range is one too short": Mutant(
        "the last of several lost frames is not recorded",
        records_a_range_too_short,
        "reported lost twice|not drained",
        ("nobody_left",),
    ),
}
