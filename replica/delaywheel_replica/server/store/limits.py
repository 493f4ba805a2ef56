"""Limits for making and writing wheels."""

from dataclasses import dataclass

from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.writing.wheel import DEFAULT_MAX_FRAME_BYTES, DEFAULT_MAX_FRAME_MESSAGES
from delaywheel_replica.server.node.disk_space import BALLAST_BYTES


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits for making and writing wheels.

    Attributes:
        span_seconds: The span of new wheels.
        dial_rows: At least the number of slots that can hold messages at one time.
        open_files: The most slot files to keep open.
        max_frame_messages: The most messages in a frame of the own wheel.
        max_frame_bytes: The most bytes in a frame of the own wheel.
        sync_groups: Nothing counts before it is on the medium.
        recent_bytes: How many of the newest bytes are kept in memory for mirrors.
        reserve_bytes: With less free space, no messages are accepted.
        ballast_bytes: How much is reserved for saves when no space is left.
        table_rows: How many index rows, roughly, slot tables may lag behind.
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
