"""Limits for making and writing wheels."""

from dataclasses import dataclass

from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.writing.wheel import DEFAULT_MAX_FRAME_BYTES, DEFAULT_MAX_FRAME_MESSAGES
from delaywheel_replica.server.node.disk_space import BALLAST_BYTES


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits for making and writing wheels.

    Attributes:
        span_seconds: of new wheels.
        dial_rows: slots that can hold messages at one time, and some.
        open_files: at most so many slot files are open.
        max_frame_messages: of one frame of the own wheel.
        max_frame_bytes: of one frame of the own wheel.
        sync_groups: nothing counts before it is on the medium.
        recent_bytes: so much of what was written last is kept for mirrors.
        reserve_bytes: with less free space no messages are taken.
        ballast_bytes: so much is kept back for saves when there is none.
        table_rows: by so many rows of the index, and some, slot tables are behind.
    """

    span_seconds: int = 7_200
    dial_rows: int = 8_192
    open_files: int = 1_024
    max_frame_messages: int = DEFAULT_MAX_FRAME_MESSAGES
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    sync_groups: bool = False
    recent_bytes: int = 8 << 20
    reserve_bytes: int = 0
    ballast_bytes: int = BALLAST_BYTES
    table_rows: int = ROWS_PER_SEGMENT
