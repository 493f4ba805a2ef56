"""Figures of scripts/chaos: of single disturbances and by kind, as a table and JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from delaywheel_replica.cli.printing.tables import print_table
from local.chaos.disturbing import How
from local.stage.stage import Ended
from local.stage.tally import Spread


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One disturbance and its consequences.

    Attributes:
        how: The kind of disturbance.
        node: The disturbed node, which was the leader.
        leader_after: The leader once the cluster was complete again.
        struck_at_ms: The wall clock just before.
        silence_ms: The time without forwarding.
        calm_silence_ms: The same for some seconds before, without any disturbance.
        spacing_ms: The usual time between arrivals, which both exclude.
        whole_after_s: The time until nothing was missing.
        open_records: Records of the transaction that was open when the leader was stopped for good;
            0: none was open, None: that was not the aim.
        load_1min: The machine's load average.
        cpu_busy_share: The share of all CPUs in use until the cluster was complete again.
    """

    how: How
    node: str
    leader_after: str
    struck_at_ms: float
    silence_ms: float
    calm_silence_ms: float
    spacing_ms: float
    whole_after_s: float
    open_records: int | None
    load_1min: float
    cpu_busy_share: float

    def line(self) -> str:
        """Describes it in one line."""
        opened = "" if self.open_records is None else f", {self.open_records:,} records uncommitted"
        return (
            f"{self.how} of {self.node}{opened}: {self.silence_ms:,.0f} ms without forwarding "
            f"(calm: {self.calm_silence_ms:,.0f} ms), {self.leader_after} leads, "
            f"whole after {self.whole_after_s:.1f} s, load {self.load_1min:.1f}, "
            f"CPU {self.cpu_busy_share:.0%}"
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """All disturbances of one kind."""

    how: How
    silence: Spread
    calm_silence: Spread
    whole_after_p50_s: float
    not_caught_open: int
    load_1min: float
    cpu_busy_share: float

    @classmethod
    def of(cls, how: How, done: Sequence[Disturbance]) -> Self:
        """Summarises one or more disturbances."""
        return cls(
            how,
            Spread.of([one.silence_ms for one in done]),
            Spread.of([one.calm_silence_ms for one in done]),
            float(np.median([one.whole_after_s for one in done])),
            sum(one.open_records == 0 for one in done),
            float(np.mean([one.load_1min for one in done])),
            float(np.mean([one.cpu_busy_share for one in done])),
        )

    @classmethod
    def of_each(cls, done: Sequence[Disturbance]) -> list[Self]:
        """Returns one summary for each kind that occurred."""
        kinds = [(how, [one for one in done if one.how is how]) for how in How]
        return [cls.of(how, of_kind) for how, of_kind in kinds if of_kind]


def print_summaries(summaries: Sequence[Summary]) -> None:
    """Prints the table of all kinds."""
    rows = [
        (
            summary.how,
            summary.silence.messages,
            *(f"{ms:,.0f}" for ms in _of_spread(summary.silence)),
            f"{summary.calm_silence.max_ms:,.0f}",
            f"{summary.whole_after_p50_s:.1f}",
            f"{summary.load_1min:.1f}",
            f"{summary.cpu_busy_share:.0%}",
        )
        for summary in summaries
    ]
    columns = ["disturbed", "times", "p50 ms", "p99 ms", "max ms", "calm max ms", "whole p50 s"]
    print("\ntime without forwarding")
    print_table([*columns, "load", "CPU"], rows)
    for summary in summaries:
        if summary.not_caught_open:
            print(f"{summary.how}: {summary.not_caught_open} times no transaction was open")


def _of_spread(spread: Spread) -> tuple[float, float, float]:
    return spread.p50_ms, spread.p99_ms, spread.max_ms


def as_json(done: Sequence[Disturbance], ended: Ended, *, is_complete: bool) -> dict[str, Any]:
    """Returns everything as JSON."""
    mirrors = asdict(ended.mirrors)
    mirrors["differing"] = [str(path) for path in ended.mirrors.differing]
    return {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "clean": is_complete and ended.is_clean,
        "recovered_always": is_complete,
        "kinds": [asdict(summary) for summary in Summary.of_each(done)],
        "disturbances": [asdict(one) for one in done],
        "verdict": asdict(ended.verdict),
        "mirrors": mirrors,
    }
