"""Errors of a node's server: acknowledging, mirroring, promising, coming back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.files.index import OpenIndexes
from delaywheel.storage.files.slot_files import SlotFiles
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.node_state import NodeState
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.leader import lost_frames as losing
from delaywheel_replica.core.member.member import Member
from delaywheel_replica.core.member.prevote import Prevote
from delaywheel_replica.core.node import rolled_back
from delaywheel_replica.core.node.events import DiskState, Effect, HeldWheel, Send, Sweep
from delaywheel_replica.core.node.shared_state import Registry
from delaywheel_replica.core.protocol.control import NodeRecord
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from delaywheel_replica.core.protocol.messages import Frames, Vote
from delaywheel_replica.core.wheels import fencing as promises
from delaywheel_replica.core.wheels import mirrors, open_wheel
from delaywheel_replica.core.wheels import own_wheels as own
from delaywheel_replica.core.wheels.completeness import Completeness
from delaywheel_replica.core.wheels.fencing import Fencing
from delaywheel_replica.core.wheels.inventory import Inventory
from delaywheel_replica.core.wheels.mirrors import Mirrors, MirrorVerdict
from delaywheel_replica.core.wheels.node_file import NodeFile
from delaywheel_replica.core.wheels.open_wheel import Replication
from delaywheel_replica.core.wheels.verifying import Verifying
from delaywheel_replica.server.commit.committer import Committer
from delaywheel_replica.server.commit.time_sharing import TimeSlice
from delaywheel_replica.server.node.disk_state import FreeSpace
from delaywheel_replica.server.store.store import Store
from sim.mutants.mutant import Mutant, Patch, everywhere, instead


def older_copies_are_not_noticed() -> list[Patch]:
    return [
        everywhere(rolled_back.was_heard_later, lambda *_: False),
        instead(NodeRecord, "is_ahead_of", lambda *_: False),
        instead(open_wheel, "_holds_unwritten", lambda *_: False),
    ]


def acknowledges_one_mirror_early() -> list[Patch]:
    def early(applied: Mapping[str, int], in_sync: Collection[str], min_insync: int) -> int | None:
        if len(in_sync) < min_insync:
            return None
        slowest_first = sorted(applied.get(member, 0) for member in in_sync)
        return slowest_first[min(1, len(slowest_first) - 1)]

    return [everywhere(open_wheel.high_watermark, early)]


def high_watermark_of_local_writes() -> list[Patch]:
    return [everywhere(open_wheel.high_watermark, lambda applied, *_: max(applied.values()))]


def answers_before_it_has_written() -> list[Patch]:
    real = Mirrors.came

    def came(self: Mirrors, sender: str, frames: Frames) -> list[Effect]:
        effects = real(self, sender, frames)
        applied = replace(self._applied(frames.card.wheel), prefix=frames.frames.last_seq)
        return [Send(sender, applied), *effects] if frames.request == 0 else effects

    return [instead(Mirrors, "came", came)]


def kinds_behind_the_first_wait() -> list[Patch]:
    real = Committer.call_for_group

    def call_for_group(self: Committer, now_ms: int, *, refused: bool) -> bool:
        is_first = self._pending[0][1].kind is not Kind.MESSAGES
        may = refused or is_first or self._is_enough()
        return may and real(self, now_ms, refused=refused)

    return [instead(Committer, "call_for_group", call_for_group)]


def promises_are_not_durable() -> list[Patch]:
    real = Store.save

    def save(self: Store, state: NodeState) -> None:
        real(self, replace(state, fenced=self.state.fenced))

    return [instead(Store, "save", save)]


def promises_are_sent_before_they_are_durable() -> list[Patch]:
    real = promises.answer

    def answer(
        state: NodeState, fence: Fence, holdings: Inventory, verifying: Verifying
    ) -> Promise | None:
        if fence.origin != state.node:
            upto = max(fence.upto, state.fenced.get(fence.origin, 0))
            state = replace(state, fenced={**state.fenced, fence.origin: upto})
        return real(state, fence, holdings, verifying)

    return [everywhere(real, answer)]


def takes_what_it_has_fenced() -> list[Patch]:
    real = mirrors.judge

    def judge(*frames: Any, **stand: Any) -> MirrorVerdict:
        return real(*frames, **{**stand, "limit": None})

    return [everywhere(real, judge)]


def fetches_what_it_has_fenced() -> list[Patch]:
    """Only the origin is refused."""
    real = mirrors.judge

    def judge(frames: Frames, held: HeldWheel | None, **stand: Any) -> MirrorVerdict:
        return real(frames, held, **(stand | {"limit": None} if frames.request else stand))

    def limit(self: Mirrors, wheel: WheelId) -> int:
        closed_at = self._closed_at(wheel)
        return self._shown.get(wheel, 0) if closed_at is None else closed_at

    return [everywhere(real, judge), instead(Mirrors, "_limit", limit)]


def who_fences_itself_goes_on() -> list[Patch]:
    real = NodeFile._may_not_stay

    def may_not_stay(self: NodeFile, wheel: WheelId) -> bool:
        with patch.object(Fencing, "upto", lambda *_: 0), patch.object(own, "is_over", _never):
            return real(self, wheel)

    return [
        instead(NodeFile, "_may_not_stay", may_not_stay),
        instead(own, "_is_held_back", _never),
    ]


def _never(*_: object) -> bool:
    return False


def opens_a_wheel_again() -> list[Patch]:
    real = own._adopted

    def adopted(state: NodeState, registry: Registry | None) -> NodeState:
        if registry is None:
            return state
        others = {wheel: record for wheel, record in registry.wheels.items() if wheel != state.open}
        known = real(replace(state, last_number=0), replace(registry, wheels=others))
        return replace(known, last_number=max(known.last_number, state.last_number))

    return [instead(own, "_adopted", adopted)]


def spare_seal_is_not_durable() -> list[Patch]:
    real = Store.save

    def save(self: Store, state: NodeState) -> None:
        before, spare = self.state.spare, state.spare
        if spare is not None and before is not None and spare.wheel == before.wheel:
            state = replace(state, spare=replace(spare, seal_slot=before.seal_slot))
        real(self, state)

    return [instead(Store, "save", save)]


def crash_leaves_members_complete() -> list[Patch]:
    real = Store.save

    def save(self: Store, state: NodeState) -> None:
        real(self, replace(state, all_incomplete=self.state.all_incomplete))

    return [instead(Store, "save", save)]


def complete_again_by_the_high_watermark() -> list[Patch]:
    def heard(self: Completeness, heartbeat: Heartbeat) -> None:
        for wheel in heartbeat.named:
            if wheel in heartbeat.wheels:
                self._targets.setdefault(wheel, heartbeat.wheels[wheel].high_watermark)

    return [instead(Completeness, "heard", heard)]


def replaced_members_count() -> list[Patch]:
    """No check compares a member's storage with the registered one."""
    applied, booted = Replication.applied, Replication.booted
    real, holders = mirrors.judge, Mirrors._holders

    def counted(self: Replication, peer: str, storage: str, *rest: Any) -> None:
        applied(self, peer, _registered(self, peer) or storage, *rest)

    def heard(self: Replication, peer: str, storage: str, *rest: Any) -> None:
        booted(self, peer, _registered(self, peer) or storage, *rest)

    def judge(frames: Frames, held: HeldWheel | None, **stand: Any) -> MirrorVerdict:
        return real(frames, held, **{**stand, "is_holder": True})

    def alike(self: Mirrors, wheel: WheelId, *card: Any) -> Mapping[str, str]:
        return {**holders(self, wheel, *card), self._known.node: self._known.storage}

    return [
        instead(Replication, "applied", counted),
        instead(Replication, "booted", heard),
        everywhere(real, judge),
        instead(Mirrors, "_holders", alike),
    ]


def _registered(replication: Replication, peer: str) -> str | None:
    mirror = replication._mirrors.get(peer)
    return None if mirror is None else mirror.storage


def boots_are_ignored() -> list[Patch]:
    applied, booted = Replication.applied, Replication.booted

    def counted(self: Replication, peer: str, storage: str, boot: str, *rest: Any) -> None:
        applied(self, peer, storage, _first_boot(self, peer) or boot, *rest)

    def heard(self: Replication, peer: str, storage: str, boot: str, *rest: Any) -> None:
        booted(self, peer, storage, _first_boot(self, peer) or boot, *rest)

    return [instead(Replication, "applied", counted), instead(Replication, "booted", heard)]


def _first_boot(replication: Replication, peer: str) -> str | None:
    mirror = replication._mirrors.get(peer)
    return None if mirror is None else mirror.boot


def half_a_group_counts_unsynced() -> list[Patch]:
    def append(self: Store, columns: Columns, kind: Kind, accepted_at_ms: int) -> WrittenGroup:
        synced, wheel = self._limits.sync_groups, self.wheel
        assert wheel is not None
        self._limits = replace(self._limits, sync_groups=False)
        try:
            group = append_unsynced(self, columns, kind, accepted_at_ms)
        finally:
            self._limits = replace(self._limits, sync_groups=synced)
        if synced:
            wheel.sync()
        return group

    append_unsynced = Store.append
    return [instead(Store, "append", append)]


def the_new_setting_of_flush_counts() -> list[Patch]:
    real = Store._start

    def start(self: Store, boot_id: str, floor: int) -> None:
        if self._limits.sync_groups:
            self._folder.state = replace(self._folder.state, unsynced=False)
        real(self, boot_id, floor)

    return [instead(Store, "_start", start)]


def stops_at_an_undeletable_file() -> list[Patch]:
    def delete(self: Undeletable, disk: Disk, path: Path, *, is_folder: bool = False) -> bool:
        del self
        if is_folder:
            disk.delete_folder(path)
        else:
            disk.delete(path)
        return True

    return [instead(Undeletable, "delete", delete)]


def a_vote_is_no_leader_heard() -> list[Patch]:
    real = Prevote.asked

    def asked(self: Prevote, *args: Any, stands: bool) -> Vote | None:
        vote = real(self, *args, stands=stands)
        self._given, self._gave_way = None, False
        return vote

    return [instead(Prevote, "asked", asked)]


def sweeps_above_the_floor() -> list[Patch]:
    real = Member._sweep

    def sweep(self: Member) -> list[Effect]:
        return [Sweep(each.floor + 3) for each in real(self) if isinstance(each, Sweep)]

    return [instead(Member, "_sweep", sweep)]


def begins_a_deleted_slot_again() -> list[Patch]:
    places = SlotFiles.places

    def end_of(files: SlotFiles, slot: int) -> int:
        handle = files._handles._handles.get((files._owner, slot))
        if handle is not None:
            return handle.end
        sizes = files._handles.disk.list_sizes(
            layout.hour_folder(files._folder, slot // layout.SECONDS_PER_HOUR)
        )
        return dict(sizes).get(layout.slot_name(slot), 0)

    def where_it_ends(
        self: SlotFiles, slots: NDArray[np.int64], edges: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        ends = [end_of(self, slot) for slot in slots.tolist()]
        self._ends.put(slots, np.array(ends, np.int64))
        return places(self, slots, edges)

    return [instead(SlotFiles, "places", where_it_ends)]


def deletes_in_one_job() -> list[Patch]:
    return [instead(TimeSlice, "is_over", _never)]


def indexes_stay_open() -> list[Patch]:
    return [instead(OpenIndexes, "use", lambda _self, _index: None)]


def one_word_makes_a_frame_lost() -> list[Patch]:
    def lacked_by_any(
        _state: object, wheel: WheelId, seqs: SeqSet, sought: losing.Sought
    ) -> SeqSet:
        said = (frames.seqs(wheel).spans for frames in sought.lacks.values())
        return seqs & SeqSet(chain.from_iterable(said))

    return [instead(losing, "_lacked_by_all", lacked_by_any)]


def keeps_its_ballast() -> list[Patch]:
    return [instead(FreeSpace, "_free_ballast", lambda _: None)]


def mirrors_into_a_full_disk() -> list[Patch]:
    return [instead(DiskState, "is_out", property(lambda _: False))]


MEMBER = {
    "older copies are not noticed": Mutant(
        "a folder that was put back from a backup takes part as if it were the newest",
        older_copies_are_not_noticed,
        "was opened before",
        ("older_copy",),
    ),
    "acknowledges one mirror early": Mutant(
        "the high watermark does not wait for the slowest of the in-sync set",
        acknowledges_one_mirror_early,
        "acknowledges .* alone",
        ("links",),
    ),
    "the high watermark is of local writes": Mutant(
        "what the origin has written is acknowledged",
        high_watermark_of_local_writes,
        "acknowledges .* alone",
        ("calm",),
        nodes=3,
    ),
    "a mirror answers before it has written": Mutant(
        "frames are reported as held when they arrive, not when they are written",
        answers_before_it_has_written,
        "acknowledges .* alone",
        ("slow_mirror",),
    ),
    "promises are not durable": Mutant(
        "a member that starts again has forgotten what it has promised",
        promises_are_not_durable,
        "closed at|beyond",
        ("forgetful",),
    ),
    "promises are sent before they are durable": Mutant(
        "a member promises first and saves then",
        promises_are_sent_before_they_are_durable,
        "closed at|beyond",
        ("forgetful",),
    ),
    "a fence does not refuse later frames": Mutant(
        "a member that has promised goes on taking frames",
        takes_what_it_has_fenced,
        "closed at|beyond",
        ("forgetful",),
    ),
    "third parties serve what is fenced": Mutant(
        "a member that has promised refuses the origin, and fetches from others",
        fetches_what_it_has_fenced,
        "closed at|beyond",
        ("third_party",),
    ),
    "who fences itself goes on": Mutant(
        "an origin that is fenced goes on with its wheel",
        who_fences_itself_goes_on,
        "closed at|beyond|keeps",
        ("self_fenced",),
    ),
    "opens a wheel again": Mutant(
        "a node that starts again takes the least wheel registered for it, used or not",
        opens_a_wheel_again,
        "opened before|WheelExists",
        ("churn",),
    ),
    "a spare's seal is not durable": Mutant(
        "the seal of a spare is reported and not saved",
        spare_seal_is_not_durable,
        "below floor|SlotFinished",
        ("spare_after_a_step",),
    ),
    "a crash leaves members complete": Mutant(
        "a changed boot id means nothing",
        crash_leaves_members_complete,
        "closed at|beyond",
        ("crash_behind",),
    ),
    "complete again by the high watermark": Mutant(
        "an incomplete member that holds what is acknowledged is complete",
        complete_again_by_the_high_watermark,
        "closed at|beyond",
        ("old_answers",),
    ),
    "a replaced member counts": Mutant(
        "an empty disk under a member's name takes and acknowledges older wheels",
        replaced_members_count,
        "acknowledges .* alone|closed at",
        ("empty_disk",),
    ),
    "boots are ignored by the origin": Mutant(
        "what a mirror said before its machine crashed still counts",
        boots_are_ignored,
        "acknowledges .* alone",
        ("old_boots",),
    ),
    "half a group counts unsynced": Mutant(
        "callers are answered for what was written of a group whose next write failed",
        half_a_group_counts_unsynced,
        "not synced",
        ("half_a_group",),
    ),
    "the new setting of flush counts": Mutant(
        "a start with synced groups trusts what was acknowledged without",
        the_new_setting_of_flush_counts,
        "starts as complete",
        ("switched_flush",),
    ),
    "an undeletable file keeps those behind it": Mutant(
        "a sweep ends at the first file that the medium does not delete",
        stops_at_an_undeletable_file,
        "still has",
        ("undeletable_files",),
    ),
    "a vote given is no leader heard": Mutant(
        "a node gives its vote to everyone who asks",
        a_vote_is_no_leader_heard,
        "candidacies",
        ("first_leader",),
    ),
    "sweeps above the floor": Mutant(
        "slots up to three above the floor are deleted",
        sweeps_above_the_floor,
        "deletes",
        ("calm",),
    ),
    "a deleted slot is begun again": Mutant(
        "an origin whose slot file was deleted or cut goes on at the end that it finds",
        begins_a_deleted_slot_again,
        "not drained .* do not hold",
        ("deleted_slot",),
    ),
    "the ballast is kept": Mutant(
        "nothing is thrown out for the saves of a full disk",
        keeps_its_ballast,
        "the floor",
        ("full_disk",),
    ),
    "a full disk is written on": Mutant(
        "a node takes frames of others for as long as its disk takes them",
        mirrors_into_a_full_disk,
        "the floor",
        ("full_disk",),
    ),
    "what is finished is deleted in one job": Mutant(
        "callers wait while a sweep goes through all its files",
        deletes_in_one_job,
        "holds up a group",
        ("slow_files",),
    ),
    "kinds behind the first wait": Mutant(
        "a cancel that is submitted behind messages waits for mirrors as they do",
        kinds_behind_the_first_wait,
        "holds up a group",
        ("cancel_beside_messages", "links", "halves"),
    ),
    "indexes stay open": Mutant(
        "every wheel that was ever read or written costs a descriptor",
        indexes_stay_open,
        "files open",
        ("churn",),
    ),
    "one word makes a frame lost": Mutant(
        "a frame is given up when one member lacks it",
        one_word_makes_a_frame_lost,
        "committed to be lost",
        ("bad_copy",),
    ),
}
