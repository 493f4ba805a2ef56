"""What makes a message a half, and what is wrong with one: for nodes, and the service in memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from delaywheel.reasons import Reason
from delaywheel.record_headers import (
    GROUP_NAME,
    HALF_DELIVER_AT,
    HALF_GROUP,
    LONGEST_HOLD_MS,
    longest_half_bytes,
)

_DUE: Final = re.compile(rb"[1-9][0-9]{11,13}")


def make_a_half(names: Collection[str]) -> bool:
    """Whether a message is a half whose headers with names of the service's own are these."""
    return {HALF_GROUP} <= set(names) <= {HALF_GROUP, HALF_DELIVER_AT}


def half_fault(
    ours: Sequence[tuple[str, bytes | None]],
    due_ms: int,
    length_bytes: int,
    now_ms: int,
    *,
    span_ms: int,
    most_bytes: int,
    skew_ms: int = 0,
) -> tuple[Reason, str] | None:
    """Returns why a half is refused; None: it is not.

    `ours` are its headers with names of the service's own, which `make_a_half`; `due_ms` is the end
    of its hold, `skew_ms` by how much clocks may differ.
    """
    given, hold_ms = dict(ours), due_ms - now_ms
    if len(ours) > len(given) or not GROUP_NAME.fullmatch(given[HALF_GROUP] or b""):
        return Reason.HALF_INVALID, f"{HALF_GROUP} must be there once, and name a group"
    if hold_ms > LONGEST_HOLD_MS + skew_ms:
        return Reason.HALF_INVALID, f"It is to be held for {hold_ms:,} ms"
    if length_bytes > longest_half_bytes(most_bytes):
        most = f"at most {longest_half_bytes(most_bytes):,} for a half: its letter has more"
        return Reason.MESSAGE_TOO_LARGE, f"{length_bytes:,} bytes, {most}"
    if HALF_DELIVER_AT not in given:
        return None
    text = given[HALF_DELIVER_AT] or b""
    if not _DUE.fullmatch(text) or int(text) == due_ms:
        what = f"{HALF_DELIVER_AT} must be Unix milliseconds, and another due than the half's"
        return Reason.HALF_INVALID, what
    return (Reason.DUE_BEYOND_SPAN, HALF_DELIVER_AT) if int(text) > now_ms + span_ms else None
