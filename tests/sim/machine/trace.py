"""Keeps the last events of a run for people, turned into text only when read."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel_replica.core.protocol.messages import WheelCard
from sim.machine.scheduler import US_PER_S, Scheduler

CAPACITY = 6_000
LINE = 500
_STORAGE = re.compile("[0-9a-f]{32}")


class Trace:
    """The latest entries of a run."""

    def __init__(self, scheduler: Scheduler, *, capacity: int = CAPACITY) -> None:
        self._scheduler = scheduler
        self._entries: deque[tuple[int, str, str, tuple[object, ...]]] = deque(maxlen=capacity)

    def add(self, who: str, what: str, *details: object) -> None:
        """Notes an event; the details are values that are formatted later."""
        self._entries.append((self._scheduler.now_us, who, what, details))

    def lines(self, last: int | None = None) -> Iterator[str]:
        """The latest entries, oldest first."""
        entries = list(self._entries)
        for at_us, who, what, details in entries[-last:] if last else entries:
            words = " ".join(map(_short, details))
            yield f"{at_us / US_PER_S:11.6f} {who:<8} {what} {words}".rstrip()


def _short(detail: object) -> str:
    text = detail if isinstance(detail, str) else _text(detail)
    return text if len(text) <= LINE else f"{text[: LINE - 3]}..."


def _text(value: object) -> str:
    """Formats a value briefly: no defaults, no contents, and only the beginning of storage ids."""
    for kind, say in _WORDS:
        if isinstance(value, kind):
            return say(value)
    return _of_fields(value) if is_dataclass(value) else str(value)


def _of_fields(value: Any) -> str:
    shown = (
        f"{each.name}={_text(getattr(value, each.name))}"
        for each in fields(value)
        if getattr(value, each.name) not in (None, (), 0, False, "") or each.default is MISSING
    )
    return f"{type(value).__name__}({', '.join(shown)})"


def _list(values: Iterable[object]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _mapping(values: Mapping[Any, Any]) -> str:
    return f"{{{', '.join(f'{_text(name)}: {_text(value)}' for name, value in values.items())}}}"


def _frames(bundle: FrameBundle) -> str:
    filled = zip(bundle.seqs.tolist(), bundle.has_content.tolist(), strict=True)
    return _list(f"{seq}{'' if has else '-'}" for seq, has in filled)


_WORDS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (WheelId, str),
    (FrameBundle, _frames),
    (WheelCard, lambda card: str(card.wheel)),
    (Spare, lambda spare: f"{spare.wheel} sealed {spare.seal_slot}"),
    (BaseException, repr),
    (str, lambda text: text[:4] if _STORAGE.fullmatch(text) else text),
    (Mapping, _mapping),
    (tuple, _list),
    (list, _list),
    (AbstractSet, _list),
)
