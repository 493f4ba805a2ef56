"""Log lines for a leader's operator: terms begun and ended, and lost or misdirected messages.

| event | level | repeated |
|---|---|---|
| `leadership taken`, `leading` | info | each time |
| `leadership lost` | warning; info when the node stops | each time |
| `candidacy failed` | warning; info where another node was first | once a minute for one reason |
| `wheel refused` | warning | once for each reason of a node |
| `messages dead-lettered` | warning | once in ten seconds, with how many |
| `frames lost` | error | each time |
| `forwards nothing` | warning | once, ten seconds after its progress has moved |
| any other change of phase: `phase` | debug | |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from delaywheel_replica.core.election.events import CANDIDATE, IN_TERM, ElectionPhase, EndReason
from delaywheel_replica.core.leader.registration import RegistrationRefusal
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.status_files import Standstill
from delaywheel_replica.process.logs import get_logger

FAILED_AGAIN_S: Final = 60.0
DEAD_AGAIN_S: Final = 10.0

_NAMED: Final = 10

_log = get_logger(__name__)


class TermLog:
    """Logs terms and outcomes, without repetition."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._failed: tuple[object, float] | None = None
        self._refused: Mapping[str, RegistrationRefusal] = {}
        self._dead = 0
        self._dead_at: float | None = None
        self._still_since_ms: int | None = None

    def stands_still(self, standstill: Standstill | None) -> None:
        """Logs that a leader does not forward what is due, and why."""
        if standstill is not None and standstill.since_ms != self._still_since_ms:
            self._still_since_ms = standstill.since_ms
            _log.warning("forwards nothing", cause=standstill.cause)

    def refused_wheels(self, refused: Mapping[str, RegistrationRefusal]) -> None:
        """Logs nodes that are given no wheel; they say it themselves where callers are refused."""
        for node, refusal in refused.items():
            if self._refused.get(node) is not refusal:
                _log.warning("wheel refused", of=node, reason=refusal.value)
        self._refused = dict(refused)

    def moved(
        self,
        before: ElectionPhase,
        phase: ElectionPhase,
        *,
        epoch: int | None,
        reason: EndReason | None,
        error: str | None,
    ) -> None:
        """Logs a change of the election's phase."""
        why = None if reason is None else reason.value
        if before in IN_TERM and phase not in IN_TERM:
            log = _log.info if phase is ElectionPhase.STOPPED else _log.warning
            log("leadership lost", reason=why, error=error)
        elif phase is ElectionPhase.LEADING:
            self._failed = None
            _log.info("leading", term_offset=epoch)
        elif phase is ElectionPhase.RESTING:
            _log.info("leadership taken", term_offset=epoch)
        elif before in CANDIDATE and phase is ElectionPhase.STANDBY:
            self._candidacy_failed(why, error)
        else:
            _log.debug("phase", phase=phase.value, before=before.value, error=error)

    def committed(self, dead: int, lost: FrameSet) -> None:
        """Logs how many dead letters a transaction made, and which frames it gave up."""
        if lost:
            named = [
                f"{wheel} {first}" if first == last else f"{wheel} {first} to {last}"
                for wheel, first, last in islice(lost.ranges(), _NAMED)
            ]
            _log.error("frames lost", frames=len(lost), named=named)
        self._dead += dead
        now = self._monotonic()
        if self._dead and (self._dead_at is None or now - self._dead_at >= DEAD_AGAIN_S):
            _log.warning("messages dead-lettered", messages=self._dead)
            self._dead, self._dead_at = 0, now

    def _candidacy_failed(self, why: str | None, error: str | None) -> None:
        now, failed = self._monotonic(), self._failed
        is_again = failed is not None and failed[0] == (why, error)
        if is_again and failed is not None and now - failed[1] < FAILED_AGAIN_S:
            _log.debug("candidacy failed", reason=why, error=error)
            return
        self._failed = (why, error), now
        # If two stand at once, one fences the other: for a minute that is no trouble.
        is_health = why == EndReason.FENCED and not is_again
        (_log.info if is_health else _log.warning)("candidacy failed", reason=why, error=error)
