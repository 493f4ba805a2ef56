"""What the demo shows while it runs: a live terminal view, or plain lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.writing.dial import DialView
from delaywheel_audit.matching.summary import FATES
from local.loopback.node import Node
from local.reconciling import Books
from local.stage.mirrors import Mirrors
from local.stage.observer import Record
from local.stage.tally import Spread, Tally, Verdict, id_of

if TYPE_CHECKING:  # it needs the Kafka client, which --help does not
    from local.showing.dead_letters import Replayed
    from local.showing.halves import Ordered
    from local.showing.retries import Retried

PAST_SECONDS = 8
COMING_SECONDS = 16
BAR_HEIGHT = 6
EIGHTHS = " ▁▂▃▄▅▆▇█"
RECENT_S = 1.0


class Sample:
    """The figures at one moment.

    Attributes:
        elapsed_s: Since the first message.
        accepted: Messages acknowledged.
        delivered: Different messages that the consumer has seen.
        recent: Lateness of what became visible within the last second.
        dial: Messages in the slot files of each second around now, oldest first.
        up: How many nodes run.
        nodes: How many there are.
    """

    def __init__(self, nodes: Sequence[Node], tally: Tally, records: Sequence[Record]) -> None:
        """Prepares; `take` fills it.

        Args:
            nodes: Of the first that runs, the dial is read in place.
            tally: What was accepted.
            records: What was received; grows.
        """
        self._nodes = nodes
        self._tally = tally
        self._records = records
        self._counted = 0
        self._seen: set[bytes] = set()
        self._recent: deque[Record] = deque()
        self.elapsed_s = 0.0
        self.accepted = 0
        self.recent = Spread.of(())
        self.dial: list[int] = [0] * (PAST_SECONDS + COMING_SECONDS)
        self.nodes = self.up = len(nodes)

    @property
    def delivered(self) -> int:
        """The number of distinct messages that the consumer has seen."""
        return len(self._seen)

    @property
    def pending(self) -> int:
        """The number of messages accepted and not seen by the consumer yet."""
        return max(self.accepted - self.delivered, 0)

    def take(self, elapsed_s: float) -> None:
        """Counts what has come since the last call."""
        self.elapsed_s = elapsed_s
        running = [node for node in self._nodes if node.is_up]
        self.up = len(running)
        self.accepted = self._tally.accepted
        fresh = self._records[self._counted :]
        self._counted += len(fresh)
        self._seen.update(map(id_of, fresh))
        self._recent.extend(fresh)
        since_ms = (time.time() - RECENT_S) * 1000
        while self._recent and self._recent[0].received_ms < since_ms:
            self._recent.popleft()
        self.recent = Spread.of(list(map(self._tally.lateness_ms, self._recent)))
        self.dial = self._read_dial((running or self._nodes)[0].data, int(time.time()))

    def _read_dial(self, data: Path, now: int) -> list[int]:
        first = now - PAST_SECONDS
        counts = np.zeros(PAST_SECONDS + COMING_SECONDS, dtype=np.int64)
        try:
            rows = DialView(PosixDisk(), data).rows(first, first + len(counts))
        except (OSError, ValueError):
            return self.dial  # just being rebuilt
        counts[rows["slot"] - first] = rows["messages"]
        return [int(count) for count in counts]


class View(Protocol):
    """Where the demo reports events, within a `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def note(self, line: str) -> None:
        """Reports an event."""

    def show(self, sample: Sample) -> None:
        """Shows the present figures."""

    def conclude(self, text: str) -> None:
        """Prints a text unchanged, after the last figures."""


class PlainView:
    """Prints events, and a line of figures now and then."""

    def __init__(self, *, figures_every_s: float = 1.0) -> None:
        self._figures_every_s = figures_every_s
        self._started_at = time.monotonic()
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, line: str) -> None:
        """Prints an event with the time since the start."""
        print(f"{time.monotonic() - self._started_at:6.1f} s  {line}", flush=True)

    def show(self, sample: Sample) -> None:
        """Prints the figures if the last ones are old enough."""
        now = time.monotonic()
        if now - self._shown_at >= self._figures_every_s:
            self._shown_at = now
            down = sample.nodes - sample.up
            state = f"  {down} NODE DOWN" if down else ""
            self.note(
                f"accepted {sample.accepted:>7,}  pending {sample.pending:>7,}  "
                f"delivered {sample.delivered:>7,}  late p50 {sample.recent.p50_ms:6.0f} ms  "
                f"max {sample.recent.max_ms:6.0f} ms{state}"
            )

    def conclude(self, text: str) -> None:
        """Prints the text."""
        print(text, flush=True)


class LiveView:
    """The dial around now and the figures, redrawn in place, with the events above.

    Until the first figures come, a spinner shows that something is under way.
    """

    def __init__(self) -> None:
        self._console = Console()
        self._waiting = self._console.status("")
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        self._waiting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.stop()
        self._live.stop()

    def note(self, line: str) -> None:
        """Prints an event, above the view."""
        elapsed_s = time.monotonic() - self._started_at
        self._console.print(f"{elapsed_s:6.1f} s  {line}", highlight=False, markup=False)

    def show(self, sample: Sample) -> None:
        """Redraws the view."""
        if not self._live.is_started:
            self._waiting.stop()
            self._live.start()
        self._live.update(Group(Text(), dial_picture(sample), Text(), _figures(sample)))
        self._live.refresh()

    def conclude(self, text: str) -> None:
        """Prints the text in place of the view, then shows a spinner."""
        self._live.stop()
        self._console.print(text, highlight=False, markup=False)
        self._waiting.start()


def dial_picture(sample: Sample) -> RenderableType:
    """Draws one bar for each second's content: done to the left of now, pending to the right."""
    most = max(*sample.dial, 1)
    eighths = [round(count * BAR_HEIGHT * 8 / most) for count in sample.dial]
    picture = Text()
    for level in reversed(range(BAR_HEIGHT)):
        label = f"{most:>7,} " if level == BAR_HEIGHT - 1 else " " * 8
        picture.append(label, style="dim")
        for place, height in enumerate(eighths):
            block = EIGHTHS[min(max(height - level * 8, 0), 8)]
            picture.append(f"{block * 2} ", style=_bar_style(place))
        picture.append("\n")
    picture.append(" " * 8 + "───" * len(eighths) + "\n", style="dim")
    ago, now, ahead = f"-{PAST_SECONDS} s", "▲ now", f"+{COMING_SECONDS} s"
    picture.append(" " * 8 + ago.ljust(PAST_SECONDS * 3), style="dim")
    picture.append(now.ljust(COMING_SECONDS * 3 - len(ahead)), style="bold")
    picture.append(ahead, style="dim")
    return picture


def _bar_style(place: int) -> str:
    if place == PAST_SECONDS:
        return "bold yellow"
    return "green" if place < PAST_SECONDS else "cyan"


def _figures(sample: Sample) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("time", "nodes up", "accepted", "pending", "delivered", "late p50", "late max"):
        table.add_column(name, justify="right", style="bold", header_style="dim", min_width=9)
    table.add_row(
        f"{sample.elapsed_s:.1f} s",
        Text(
            f"{sample.up} of {sample.nodes}",
            style="green" if sample.up == sample.nodes else "bold red",
        ),
        *(f"{count:,}" for count in (sample.accepted, sample.pending, sample.delivered)),
        *(f"{value:.0f} ms" for value in (sample.recent.p50_ms, sample.recent.max_ms)),
    )
    return table


def verdict_text(
    verdict: Verdict,
    mirrors: Mirrors,
    replayed: Replayed | None = None,
    retried: Retried | None = None,
    ordered: Ordered | None = None,
) -> str:
    """Returns the closing table."""
    counts = [
        ("accepted", verdict.accepted),
        ("delivered", verdict.delivered),
        ("lost", verdict.lost),
        ("duplicated", verdict.duplicated),
        ("early", verdict.early),
        ("altered", verdict.altered),
    ]
    counts += [(f"cancels {name}", count) for name, count in sorted(verdict.cancels.items())]
    counts += [
        (name, count)
        for name, count in (
            ("not accepted", verdict.not_accepted),
            ("unknown records", verdict.strangers),
            ("cancels asked again", verdict.cancels_resolved),
            ("cancelled, came", verdict.cancelled_delivered),
        )
        if count
    ]
    lines = ["", *(f"{name:<25}{count:>9,}" for name, count in counts), ""]
    if verdict.cancels_failed:
        said = verdict.cancels_failed.items()
        lines += [*(f"{count:>9,} cancels: {error}" for error, count in said), ""]
    lines.append(f"{'':<24}{'messages':>9}{'p50':>11}{'p99':>11}{'max':>11}")
    spreads = [
        ("acknowledged within", verdict.acks),
        ("late" if verdict.across_kill is None else "late in health", verdict.in_health),
        ("late across the kill", verdict.across_kill),
    ]
    for name, spread in spreads:
        if spread is not None:
            values = (spread.p50_ms, spread.p99_ms, spread.max_ms)
            figures = "".join(f"{value:>8,.0f} ms" for value in values)
            lines.append(f"{name:<24}{spread.messages:>9,}{figures}")
    if verdict.silence_ms is not None:
        lines.append(f"{'time without forwarding':<24}{verdict.silence_ms:>42,.0f} ms")
    lines.append("")
    if mirrors.nodes > 1:
        lines += [_mirrors_text(mirrors), ""]
    if replayed is not None:
        lines += [*_replayed_lines(replayed), ""]
    if retried is not None:
        lines += [*_retried_lines(retried), ""]
    if ordered is not None:
        lines += [*_ordered_lines(ordered), ""]
    if verdict.is_clean and not mirrors.differing:
        lines.append("Every message arrived exactly once, none early, byte for byte.")
    else:
        lines.append("NOT every message arrived exactly once, in time and unchanged.")
    return "\n".join(lines)


def books_text(books: Books, verdict: Verdict) -> str:
    """Returns the reconciliation next to the consumer's count, and the page's place."""
    lines = ["", f"{'':<17}{'consumer':>9}{'the books':>12}"]
    for name, by_consumer, by_books in books.compared(verdict):
        differs = "" if by_consumer == by_books else "  NOT the same"
        lines.append(f"{name:<17}{by_consumer:>9,}{by_books:>12,}{differs}")
    return "\n".join([*lines, "", ledger_text(books)])


def ledger_text(books: Books) -> str:
    """Returns what became of the rows of the ledger, whether they balance, and the page's place."""
    summary = books.summary
    parts = [f"{n:,} {_words(name)}" for name in FATES if (n := summary.counts[name])]
    found = [f"{n:,} {_words(kind)}" for kind, n in summary.findings.items() if n]
    said = "The books balance" if summary.balanced else "The books do NOT balance"
    return (
        f"{summary.counts['accepted']:,} rows of the ledger = {' + '.join(parts) or '0'}.\n"
        f"{said}; findings: {', '.join(found) or 'none'}. The page: {books.page}"
    )


def _replayed_lines(replayed: Replayed) -> list[str]:
    counts = [
        (f"dead letter, {replayed.reason}", 1),
        ("replayed", replayed.first),
        ("replayed by the same command again", replayed.second),
        ("arrived in its topic", replayed.arrived),
    ]
    return [f"{name:<36}{count:>9,}" for name, count in counts]


def _retried_lines(retried: Retried) -> list[str]:
    pairs = zip(retried.delays_ms, retried.waited_ms, strict=True)
    waits = [f"{f'retried after {due_ms:,} ms, came after':<36}{ms:>9,} ms" for due_ms, ms in pairs]
    return [*waits, f"{'done at the last attempt':<36}{retried.done:>9,}"]


def _ordered_lines(ordered: Ordered) -> list[str]:
    counts = [
        ("half, committed, arrived", ordered.arrived.count(b"committed")),
        ("half, rolled back, arrived", ordered.arrived.count(b"rolled back")),
        (
            f"half, check says {ordered.verdict}, arrived",
            ordered.arrived.count(b"not heard of again"),
        ),
    ]
    return [f"{name:<36}{count:>9,}" for name, count in counts]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _mirrors_text(mirrors: Mirrors) -> str:
    what = f"{mirrors.files:,} slot files, {mirrors.length_bytes:,} bytes"
    if not mirrors.differing:
        return f"{what}: the same on {mirrors.nodes} nodes, byte for byte."
    return f"{what}: {len(mirrors.differing):,} are NOT the same on {mirrors.nodes} nodes."
