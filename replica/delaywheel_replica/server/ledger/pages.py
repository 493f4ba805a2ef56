"""Puts the rows of one wheel in place: file by file, and gaps where rows are missing.

A file lies in one hour of acceptance and has at most `MAX_FILE_ROWS`; its range extends to where
the next one begins, so frames without rows (cancels) leave no hole between names. Only one group of
rows is in memory, and what Parquet keeps of a file until it ends: some bytes per group.
"""

import contextlib
from collections.abc import Callable
from typing import Final

import pyarrow.parquet as pq

from delaywheel.identity import WheelId
from delaywheel_replica.server.ledger.notes import Gap, GapReason
from delaywheel_replica.server.ledger.place import HOUR_MS, UNREACHED, LedgerStorage
from delaywheel_replica.server.ledger.rows import Block
from delaywheel_replica.server.ledger.source import RowGroups, UnreadableFrame

MAX_FILE_ROWS: Final = 4_000_000


class LedgerPages:
    """One pass over one wheel. Any method may raise what accessing the place raises."""

    def __init__(
        self,
        place: LedgerStorage,
        wheel: WheelId,
        first_seq: int,
        *,
        node: str,
        born_ms: int,
        now_ms: int,
        on_file: Callable[[int, int], None],
        on_gap: Callable[[Gap], None],
    ) -> None:
        """Begins after the files that are in place.

        Args:
            first_seq: The first seq of the next name.
            born_ms: Nothing of the wheel was accepted before.
            on_file: Called when a file is in place, with its last seq and number of rows.
        """
        self._place = place
        self._wheel = wheel
        self._first_seq = first_seq
        self._node = node
        self._born_ms = born_ms
        self._now_ms = now_ms
        self._on_file = on_file
        self._on_gap = on_gap
        self._writer: pq.ParquetWriter | None = None
        self._groups = RowGroups(wheel)
        self._rows = 0
        self._dues_ms = 0, 0
        # Of the last messages that were seen.
        self._accepted_at_ms: int | None = None
        # The messages of the open gap; None: no gap is open.
        self._gap_messages: int | None = None

    def add(self, piece: Block | UnreadableFrame) -> None:
        """Adds the next rows."""
        if isinstance(piece, UnreadableFrame):
            self._end_file(piece.seq - 1)
            self._gap_messages = (self._gap_messages or 0) + piece.messages
        elif len(piece):
            self._end_gap(piece.first_seq - 1, piece.accepted_at_ms)
            if self._writer is not None and not self._fits(piece):
                self._end_file(piece.first_seq - 1)
            self._write(piece)

    def finish(self, last_seq: int) -> None:
        """Finishes, with everything up to this seq added."""
        self._end_file(last_seq)
        self._end_gap(last_seq, self._now_ms)

    def abandon(self) -> None:
        """Discards what is not in place yet."""
        if self._writer is not None:
            with contextlib.suppress(*UNREACHED):
                self._writer.close()
            self._writer = None

    def _fits(self, block: Block) -> bool:
        assert self._accepted_at_ms is not None
        is_hour = block.accepted_at_ms // HOUR_MS == self._accepted_at_ms // HOUR_MS
        return is_hour and self._rows < MAX_FILE_ROWS

    def _write(self, block: Block) -> None:
        if self._writer is None:
            self._writer = self._place.begin()
            self._rows = 0
        dues_ms = int(block.due_ms.min()), int(block.due_ms.max())
        if self._rows:
            dues_ms = min(dues_ms[0], self._dues_ms[0]), max(dues_ms[1], self._dues_ms[1])
        self._dues_ms = dues_ms
        self._accepted_at_ms = block.accepted_at_ms
        self._rows += len(block)
        for table in self._groups.add(block):
            self._writer.write_table(table)

    def _end_file(self, last_seq: int) -> None:
        if self._writer is None:
            return
        for table in self._groups.rest():
            self._writer.write_table(table)
        self._writer.close()
        self._writer = None
        assert self._accepted_at_ms is not None
        self._place.put_file(
            self._wheel, self._first_seq, last_seq, self._accepted_at_ms, self._dues_ms
        )
        self._first_seq = last_seq + 1
        self._on_file(last_seq, self._rows)

    def _end_gap(self, last_seq: int, accepted_to_ms: int) -> None:
        if self._gap_messages is None:
            return
        before_ms = self._accepted_at_ms
        gap = Gap(
            wheel=self._wheel,
            first_seq=self._first_seq,
            last_seq=last_seq,
            accepted_from_ms=self._born_ms if before_ms is None else before_ms,
            accepted_to_ms=accepted_to_ms,
            messages=self._gap_messages,
            reason=GapReason.FRAMES_LOST,
            node=self._node,
            recorded_at_ms=self._now_ms,
        )
        self._place.put_gap(gap)
        self._first_seq, self._gap_messages = last_seq + 1, None
        self._on_gap(gap)
