"""Long disk work in steps, so that other work can run in between.

A generator that yields after each file, or each piece of a large one, and returns what it found.
Between two pieces nothing is half done that anybody else could see; it may be left for good there.
"""

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]


def finish(steps: Steps[T], between: Callable[[], object] = lambda: None) -> T:
    """Runs all remaining steps; returns the result.

    Args:
        steps: what is to be done.
        between: is called after each piece: others may want the disk.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the standard library's stubs
        finally:
            between()
