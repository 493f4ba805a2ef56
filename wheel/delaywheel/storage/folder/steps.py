"""Long disk work in steps, so that other work can run in between.

The work is a generator that yields after each file, or each piece of a large one, and returns its
result. Between two pieces no half-done change is visible to others; the work may be abandoned there
for good.
"""

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]


def finish(steps: Steps[T], between: Callable[[], object] = lambda: None) -> T:
    """Runs all remaining steps, and `between` after each, as others may want the disk."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the standard library's stubs
        finally:
            between()
