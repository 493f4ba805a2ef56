"""What a committed progress must not be followed by."""

from collections.abc import Collection
from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.progress import Position, Progress, SetBackRefusal


def violations(before: Progress, after: Progress, leaving: Collection[WheelId] = ()) -> list[str]:
    """Returns why `after` may not be committed over `before`; empty if it may.

    Args:
        before: The committed progress.
        after: What a transaction would commit.
        leaving: The wheels that the same transaction unregisters.
    """
    if after.set_backs == before.set_backs:
        found = _violations_of_a_step(before, after, leaving)
    else:
        found = _violations_of_a_set_back(before, after, leaving)
    if after.floor < before.floor:
        found.append(f"floor goes back from {before.floor} to {after.floor}")
    for wheel, seq in before.seqs.items():
        if wheel not in after.seqs and wheel in leaving:
            continue
        if after.seq(wheel) < seq:
            found.append(f"seq of {wheel} goes back from {seq} to {after.seq(wheel)}")
    found += [f"{wheel} leaves but is named" for wheel in leaving if wheel in after.seqs]
    return found


def _violations_of_a_step(
    before: Progress, after: Progress, leaving: Collection[WheelId]
) -> list[str]:
    """Checks what must hold from one transaction to the next."""
    found = []
    if after.due_ms < before.due_ms:
        found.append(f"due goes back from {before.due_ms} to {after.due_ms}")
    if after.due_ms == before.due_ms and before.position is not None:
        found += _violations_of_a_split(before, before.position, after, leaving)
    ahead = before.without(leaving).ahead
    if after.ahead != tuple(done for done in ahead if done.last_due_ms > after.due_ms):
        found.append(f"done ahead was {ahead} and is {after.ahead} at {after.due_ms}")
    return found


def _violations_of_a_set_back(
    before: Progress, after: Progress, leaving: Collection[WheelId]
) -> list[str]:
    """Checks a w that is set back: everything else, and all that is done, stays."""
    expected = before.without(leaving).set_back(after.due_ms)
    if isinstance(expected, SetBackRefusal):
        return [f"set back from {before.due_ms} to {after.due_ms}: {expected}"]
    if replace(after, floor=expected.floor) != expected:
        return [f"set back to {after} instead of {expected}"]
    return []


def _violations_of_a_split(
    before: Progress, position: Position, after: Progress, leaving: Collection[WheelId]
) -> list[str]:
    """Checks what must hold from one transaction to the next within one millisecond."""
    found = []
    if after.position is None or after.position < position:
        found.append(f"position goes back from {position} to {after.position}")
    if dict(after.seqs) != dict(before.without(leaving).seqs):
        found.append("seqs move while one millisecond is being split")
    return found
