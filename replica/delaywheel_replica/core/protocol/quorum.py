"""How many members each decision needs.

N members hold a wheel; a frame is acknowledged when every in-sync member holds it and never
fewer than W = ``min_insync``. Then any R = N - W + 1 members include a holder of every
acknowledged frame.
"""

from collections.abc import Collection, Iterable, Mapping


def required_answers(members: int, min_insync: int) -> int:
    """Returns R: any R members include a holder of every acknowledged frame."""
    if not 1 <= min_insync <= members:
        raise ValueError(f"min_insync {min_insync} of {members} members")
    return members - min_insync + 1


def held_by(applied: Iterable[int], holders: int) -> int:
    """Returns the greatest seq that at least this many of the members hold, or 0."""
    greatest_first = sorted(applied, reverse=True)
    return greatest_first[holders - 1] if len(greatest_first) >= holders else 0


def high_watermark(
    applied: Mapping[str, int], in_sync: Collection[str], min_insync: int
) -> int | None:
    """Returns the greatest seq that all in-sync members hold; None while fewer than W are in sync.

    Args:
        applied: What each member is known to hold, including the origin's own last seq.
        in_sync: The members whose answers are waited for.
        min_insync: W.
    """
    if len(in_sync) < min_insync:
        return None
    return min(applied.get(member, 0) for member in in_sync)
