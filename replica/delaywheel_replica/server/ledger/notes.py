"""What the publisher must remember over a restart, in a small file.

    <data>/ledger/books.json

For each wheel that this node has files of:

- up to where its files and gaps are in place, so that names are looked for no further back;
- up to where any node reported it as published or given up: the floor waits for these reports, and
  nodes that are all restarted would remember none of them;
- a gap that was decided while the place was away. That decision is durable before it is reported:
  from then on the frames may be deleted.

A wheel has at most one gap that is not in place yet: it goes there before anything later does, and
rows given up meanwhile extend it.

A decision that is to free space needs some itself. `ballast`, a file next to it, is deleted if the
disk has not even that left, and created again when it has.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel_replica.core.protocol.codec import (
    MalformedError,
    Natural,
    Positive,
    decode,
    encode,
)
from delaywheel_replica.process.logs import get_logger

_BALLAST_BYTES: Final = 64 << 10

_log = get_logger(__name__)


class GapReason(StrEnum):
    """Why rows were given up."""

    DISK_RESERVE = "DISK_RESERVE"
    """The disk reached its reserve while the place was away."""
    FRAMES_LOST = "FRAMES_LOST"
    """No node can read the frames any more, and no row was kept of them."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Frames of which the ledger has no rows; they were accepted within these times.

    Attributes:
        messages: The messages in it, as far as known.
        node: The node that decided it, at `recorded_at_ms` by its wall clock.
    """

    wheel: WheelId
    first_seq: Positive
    last_seq: Positive
    accepted_from_ms: int
    accepted_to_ms: int
    messages: Natural
    reason: GapReason
    node: str
    recorded_at_ms: int

    def followed_by(self, other: Self) -> Self:
        """Returns this gap merged with the adjacent next one."""
        return replace(
            other,
            first_seq=self.first_seq,
            accepted_from_ms=min(self.accepted_from_ms, other.accepted_from_ms),
            accepted_to_ms=max(self.accepted_to_ms, other.accepted_to_ms),
            messages=self.messages + other.messages,
        )


@dataclass(frozen=True, slots=True)
class _Content:
    """What the file holds.

    Attributes:
        placed: How far each wheel is in place.
        gaps: Those that are not.
        reported: Up to where each wheel was reported as published.
    """

    placed: Mapping[WheelId, Natural]
    gaps: tuple[Gap, ...]
    reported: Mapping[WheelId, Natural]


class Notes:
    """The file, and its content. For one thread."""

    def __init__(self, disk: Disk, data: Path) -> None:
        """Reads the file; one that cannot be read or parsed counts as absent.

        Names in a shared place say it again; elsewhere a gap that was not in place is a hole there.
        """
        self._disk = disk
        self._path = data / "ledger" / "books.json"
        self._ballast = data / "ledger" / "ballast"
        self._placed: dict[WheelId, int] = {}
        self._gaps: dict[WheelId, Gap] = {}
        self._reported: dict[WheelId, int] = {}
        self._is_folder_synced = False
        try:
            content = decode(_Content, disk.read_file(self._path))
        except FileNotFoundError:
            return
        except (OSError, MalformedError) as error:
            if isinstance(error, OSError) and not is_medium_error(error):
                raise
            _log.error("books.json ignored", error=str(error))
            return
        self._placed = dict(content.placed)
        self._gaps = {gap.wheel: gap for gap in content.gaps}
        self._reported = dict(content.reported)
        with contextlib.suppress(OSError):  # an earlier process may have died behind the rename
            disk.sync_folder(self._path.parent)

    def take_ballast(self) -> None:
        """Creates the ballast if it is absent and there is room."""
        if self._disk.exists(self._ballast):
            return
        with contextlib.suppress(OSError):
            self._disk.replace_file(self._ballast, bytes(_BALLAST_BYTES))

    @property
    def gaps(self) -> Mapping[WheelId, Gap]:
        """The gaps that are not in place yet."""
        return self._gaps

    @property
    def reported(self) -> Mapping[WheelId, int]:
        """Up to where wheels were reported as published, by this node or others."""
        return self._reported

    def placed(self, wheel: WheelId) -> int:
        """Returns the seq up to which files and gaps are in place, at least."""
        return self._placed.get(wheel, 0)

    def place(self, wheel: WheelId, seq: int) -> None:
        """Notes that files and gaps are in place up to this seq; an OSError changes nothing."""
        placed = {**self._placed, wheel: seq}
        gap = self._gaps.get(wheel)
        is_gap_placed = gap is not None and gap.last_seq <= seq
        gaps = {w: g for w, g in self._gaps.items() if not (w == wheel and is_gap_placed)}
        self._write(placed, gaps, self._reported)

    def give_up(self, gap: Gap) -> None:
        """Notes that these rows will never be published; after an OSError that is not decided."""
        before = self._gaps.get(gap.wheel)
        joined = gap if before is None else before.followed_by(gap)
        gaps = {**self._gaps, gap.wheel: joined}
        try:
            self._write(self._placed, gaps, self._reported)
        except OSError:
            self._disk.delete(self._ballast)
            self._write(self._placed, gaps, self._reported)

    def keep(self, reported: Mapping[WheelId, int]) -> None:
        """Notes what is reported, and forgets all wheels but these, except for gaps.

        `reported` has every wheel that this node has files of. What was noted before stays true,
        and gaps must be put in place however old they are.
        """
        kept = {w: seq for w, seq in self._placed.items() if w in reported or w in self._gaps}
        known = {w: max(seq, self._reported.get(w, 0)) for w, seq in reported.items()}
        known = {wheel: seq for wheel, seq in known.items() if seq}
        if (kept, known) != (self._placed, self._reported):
            self._write(kept, self._gaps, known)

    def _write(
        self, placed: dict[WheelId, int], gaps: dict[WheelId, Gap], reported: dict[WheelId, int]
    ) -> None:
        content = encode(_Content(placed, tuple(gaps.values()), reported))
        if not self._is_folder_synced:  # an earlier process may have made it, and died
            self._disk.make_folder(self._path.parent)
            self._disk.sync_folder(self._path.parent.parent)
            self._is_folder_synced = True
        self._disk.replace_file(self._path, content)
        self._placed, self._gaps, self._reported = placed, gaps, reported
