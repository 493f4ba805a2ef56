"""Answers questions: ListSlots, GetSlot, GetMessage, DescribeCluster.

The answering node's view, never a promise: raw rows, counted as written. Slot files are read on a
thread of its own, so that a large second holds up nobody who sends.
"""

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Final

from delaywheel.dial import DialView
from delaywheel.disk import Disk
from delaywheel.identity import NameInvalidError, WheelId
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.config import Config
from delaywheel_replica.core.progress import Position, Progress
from delaywheel_replica.core.status import CleanerStatus
from delaywheel_replica.server.references import Reference
from delaywheel_replica.server.refusals import RefusedError
from delaywheel_replica.server.scan import Found, Scanner, cancelled_keys, key_of
from delaywheel_replica.server.status import NodeView, wall_ms
from delaywheel_replica.server.stored import progress_message, rows_after, stored_message

_SLOTS_AT_MOST: Final = 10_000
_PAGE_DEFAULT: Final = 100
_PAGE_AT_MOST: Final = 1_000
# A page that carries contents ends when it gets so long.
_PAGE_BYTES: Final = 2 << 20
_SLOT_BEYOND: Final = 1 << 32
_PAGE_TOKEN = re.compile(r"(?P<wheel>[^/]+)/(?P<seq>\d{1,18})/(?P<row>\d{1,9})")


class Queries:
    """Looks at what this node holds. For the event loop's thread."""

    def __init__(self, disk: Disk, view: NodeView, config: Config) -> None:
        self._view = view
        self._config = config
        self._dial = DialView(disk, view.folder.data)
        self._scanner = Scanner(disk, view.folder.data)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="queries")

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    async def find(self, reference: Reference) -> Found:
        """Where a message and its cancels lie; below the floor there is nothing to be found."""
        progress = self._progress()
        if progress is not None and reference.slot < progress.floor:
            # Its rows may still be in an index, its file is gone: nothing that others could hold.
            return Found()
        return await asyncio.get_running_loop().run_in_executor(
            self._thread,
            self._scanner.find,
            reference.slot,
            reference.id,
            self._limits(),
            reference.due_ms,
        )

    async def get_message(self, reference: Reference) -> pb.StoredMessage:
        """One message with its content.

        Raises:
            RefusedError: MESSAGE_NOT_FOUND; NOT_UP_TO_DATE when it may lie in what cannot be read.
        """
        found = await self.find(reference)
        if found.first is None:
            reason = Reason.MESSAGE_NOT_FOUND if found.complete else Reason.NOT_UP_TO_DATE
            raise RefusedError(reason)
        frame, row = found.first
        return stored_message(
            frame, row, self._progress(), cancelled=bool(found.cancels), with_content=True
        )

    def list_slots(self, request: pb.ListSlotsRequest) -> pb.ListSlotsResponse:
        """The seconds that hold messages, from the dial."""
        limit = min(request.limit or _SLOTS_AT_MOST, _SLOTS_AT_MOST)
        to_slot = request.to_slot if request.HasField("to_slot") else None
        rows = self._dial.rows(request.from_slot if request.HasField("from_slot") else 0, to_slot)
        answer = pb.ListSlotsResponse(
            slots=[
                pb.SlotRow(
                    slot=int(row["slot"]),
                    messages=int(row["messages"]),
                    length_bytes=int(row["length_bytes"]),
                    frames=int(row["frames"]),
                    cancels=int(row["cancels"]),
                    wheels=int(row["wheels"]),
                )
                for row in rows[:limit]
            ],
            node=self._config.node_id,
            wheels=self._wheels(),
            progress=progress_message(self._progress()),
        )
        if len(rows) > limit:
            answer.next_slot = int(rows[limit]["slot"])
        return answer

    async def get_slot(self, request: pb.GetSlotRequest) -> pb.GetSlotResponse:
        """The messages of one second, a page.

        Raises:
            RefusedError: SLOT_INVALID, PAGE_TOKEN_INVALID.
        """
        if not 0 < request.slot < _SLOT_BEYOND:
            raise RefusedError(Reason.SLOT_INVALID)
        after = _page_position(request.page_token)
        return await asyncio.get_running_loop().run_in_executor(
            self._thread,
            self._page,
            request,
            after,
            self._limits(),
            self._progress(),
        )

    def describe_cluster(self, address: str, *, accepting: bool) -> pb.DescribeClusterResponse:
        """Members, wheels, leader, progress, floor, limits."""
        config, status = self._config, self._view.cleaner.status
        answer = pb.DescribeClusterResponse(
            cluster_id=config.cluster_id,
            node=config.node_id,
            version=version("delaywheel"),
            members=[
                pb.Member(
                    node=node,
                    address=address if node == config.node_id else known_address,
                    reachable=node == config.node_id,
                    accepting=accepting and node == config.node_id,
                    complete=self._view.complete and node == config.node_id,
                )
                for node, known_address in sorted(config.members.items())
            ],
            min_insync=config.min_insync_members,
            wheels=self._wheels(),
            progress=progress_message(self._progress()),
            lateness_ms=self._lateness_ms(status),
            levels=[pb.Level(name=name, delay_ms=ms) for name, ms in config.levels.items()],
            limits=pb.Limits(
                span_seconds=config.span_seconds,
                late_window_seconds=config.late_window_seconds,
                max_message_bytes=config.max_message_bytes,
                max_request_messages=config.max_request_messages,
                max_request_bytes=config.max_request_bytes,
            ),
            now_ms=wall_ms(),
        )
        if self._view.cleaner.leader_clock_ms is not None and status is not None and status.leader:
            answer.leader.node = status.leader.node
            answer.leader.epoch = status.leader.epoch
        if status is not None and status.floor is not None:
            answer.floor = status.floor
        return answer

    # --- what the node knows

    def _progress(self) -> Progress | None:
        status = self._view.cleaner.status
        return None if status is None else status.progress

    def _lateness_ms(self, status: CleanerStatus | None) -> int:
        """As the cleaner told it, grown by its silence."""
        if status is None or not status.lateness_ms:
            return 0
        return status.lateness_ms + max(0, wall_ms() - status.wall_ms)

    def _limits(self) -> dict[WheelId, int]:
        limits = {wheel: held.applied for wheel, held in self._view.held.items()}
        line = self._view.line()
        if line is not None:
            limits[line.wheel] = line.origin.last_seq
        return limits

    def _wheels(self) -> list[pb.WheelStatus]:
        status, state, line = self._view.cleaner.status, self._view.folder.state, self._view.line()
        beat = self._view.beat()
        registered = {} if status is None else status.wheels
        progress = self._progress()
        rows = []
        for wheel in sorted(beat.wheels.keys() | registered.keys()):
            record = registered.get(wheel)
            told = beat.wheels.get(wheel)
            row = pb.WheelStatus(
                wheel=str(wheel),
                node=wheel.node,
                state=pb.WHEEL_STATE_FENCED,
                applied_seq=told.applied if told is not None else 0,
                high_watermark=told.high_watermark if told is not None else 0,
                progress_seq=progress.seq(wheel) if progress is not None else 0,
            )
            if record is not None and record.closed_at is not None:
                row.state = pb.WHEEL_STATE_CLOSED
                row.final_seq = record.closed_at
            elif line is not None and wheel == line.wheel:
                row.state = pb.WHEEL_STATE_OPEN
                row.in_sync.extend(sorted(line.origin.in_sync))
            elif wheel.number > state.last_number or beat.spare == wheel:
                row.state = pb.WHEEL_STATE_SPARE
            rows.append(row)
        return rows

    def _page(
        self,
        request: pb.GetSlotRequest,
        after: Position | None,
        limits: Mapping[WheelId, int],
        progress: Progress | None,
    ) -> pb.GetSlotResponse:
        page_size = min(request.page_size or _PAGE_DEFAULT, _PAGE_AT_MOST)
        frames = list(self._scanner.frames(request.slot, limits))
        cancelled = cancelled_keys(frames)
        answer = pb.GetSlotResponse()
        length_bytes = 0
        for frame, row in rows_after(frames, after):
            if len(answer.messages) >= page_size or length_bytes >= _PAGE_BYTES:
                answer.next_page_token = str(after)
                break
            answer.messages.append(
                stored_message(
                    frame,
                    row,
                    progress,
                    cancelled=key_of(frame.columns, row) in cancelled,
                    with_content=request.with_content,
                )
            )
            if request.with_content:
                length_bytes += answer.messages[-1].ByteSize()
            after = Position(frame.wheel, frame.seq, row)
        return answer


def _page_position(token: str) -> Position | None:
    if not token:
        return None
    match = _PAGE_TOKEN.fullmatch(token)
    if match is None:
        raise RefusedError(Reason.PAGE_TOKEN_INVALID)
    try:
        return Position(WheelId.parse(match["wheel"]), int(match["seq"]), int(match["row"]))
    except NameInvalidError as error:
        raise RefusedError(Reason.PAGE_TOKEN_INVALID) from error
