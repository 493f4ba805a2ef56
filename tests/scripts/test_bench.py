"""The benchmark's pure parts: /proc read, rounds and ratios, the pace, the page."""

from __future__ import annotations

import os
import re
import threading
import time
from itertools import count
from typing import cast

import numpy as np
import pytest

from local.bench.cli import argument_parser, options_of
from local.bench.figures import Extent, by_second, differences, ratios
from local.bench.jobs import Sent, paced, value_of
from local.bench.page import page_of, stack
from local.bench.report import print_report
from local.bench.rounds import disturbances, in_turn, is_steady, run_rounds, warm_up
from local.bench.running import Options, Spent, as_document, compared
from local.bench.stand import Part
from local.bench.usage import (
    Look,
    Usage,
    Watch,
    cpu_s_of,
    look,
    switches_of,
)
from local.bench.workloads import USUAL, WORKLOADS
from local.stage.changing import CALLS, ENDS, SENDS
from local.stage.scraping import Cost, NodeCost
from local.stage.tally import Spread
from local.viewing.memory import private_bytes, resident_bytes

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class TestUsage:
    def test_a_name_with_parentheses_does_not_shift_the_fields(self) -> None:
        fields = "S 1 7 7 0 -1 4194304 1 2 3 4 120 30 5 6 20 0 9 0 100"
        assert cpu_s_of(f"7 (a) (b c)) {fields}") == 150 / TICKS_PER_S

    def test_switches_of_both_kinds_count(self) -> None:
        status = "Name:\tx\nvoluntary_ctxt_switches:\t41\nnonvoluntary_ctxt_switches:\t2\n"
        assert switches_of(status) == 43

    def test_threads_that_begin_count_and_those_that_end_do_not(self) -> None:
        used = Usage.between(Look(1.0, {1: 10, 2: 500}), Look(1.5, {1: 15, 3: 7}))
        assert used == Usage(0.5, 12)

    def test_threads_of_a_process_are_seen(self) -> None:
        go_on = threading.Event()
        thread = threading.Thread(target=go_on.wait)
        before = look(os.getpid())
        thread.start()
        after = look(os.getpid())
        go_on.set()
        thread.join()
        assert before is not None
        assert after is not None
        assert len(after.switches) == len(before.switches) + 1

    def test_memory_that_is_its_own_is_a_part_of_it(self) -> None:
        assert 0 < private_bytes(os.getpid()) <= resident_bytes(os.getpid()) + (1 << 20)

    def test_there_is_no_such_process(self) -> None:
        assert look(2**22 + 1) is None


def node_cost(**events: int) -> NodeCost:
    counts = {"elections": 0, "in_sync_changes": 0, "restarts": 0, **events}
    return NodeCost(0, 0, {}, counts["elections"], counts["in_sync_changes"], counts["restarts"])


class TestRounds:
    def test_disturbed_rounds_are_void_and_repeated(self) -> None:
        done = run_rounds(3, lambda number: number, lambda one: "an election" if one == 1 else "")
        assert done.kept == [0, 2, 3]
        assert done.void == ["an election"]

    def test_repeating_ends(self) -> None:
        measured = count()
        done = run_rounds(3, lambda _: next(measured), lambda _: "restarted")
        assert done.kept == []
        assert len(done.void) == next(measured) == 6

    @pytest.mark.parametrize(
        ("event", "reported"),
        [
            ("elections", "elections 1"),
            ("in_sync_changes", "in-sync changes 1"),
            ("restarts", "restarted processes 1"),
        ],
    )
    def test_what_disturbs(self, event: str, reported: str) -> None:
        calm = node_cost()
        assert disturbances(Cost({"n1": calm}, 0.5)) == ""
        assert disturbances(Cost({"n1": calm, "n2": node_cost(**{event: 1})}, 0.5)) == reported

    def test_each_kind_is_first_in_turn(self) -> None:
        assert [in_turn("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], Options(5, 20, warm=True)),
        (["--short"], Options(1, 5, warm=False)),
        (["--short", "--seconds", "30", "--alone"], Options(1, 30, warm=False, alone=True)),
    ],
)
def test_how_long_a_measurement_takes(arguments: list[str], wanted: Options) -> None:
    assert options_of(argument_parser().parse_args(arguments)) == wanted


class TestWarmth:
    @pytest.mark.parametrize(
        ("costs_ms", "steady"),
        [
            ([9.0, 9.0], False),
            ([20.0, 9.0, 8.0], False),
            ([20.0, 8.2, 8.0], True),
            ([20.0, 8.0, 9.0], True),
        ],
    )
    def test_two_windows_alike(self, costs_ms: list[float], *, steady: bool) -> None:
        assert is_steady(costs_ms) is steady

    def test_it_ends_after_two_minutes_of_work(self) -> None:
        costs_ms = (100.0 * 0.8**n for n in count())
        assert len(warm_up(lambda _: next(costs_ms), lambda _: None)) == 12


class TestFigures:
    def test_ratios_go_round_by_round(self) -> None:
        assert ratios([1.0, 8.0, 3.0], [1.0, 2.0, 0.0]) == Extent(1.0, 2.5, 4.0)
        assert differences([1.0, 8.0], [3.0, 2.0]) == Extent(-2.0, 2.0, 6.0)
        assert ratios([1.0], [0.0]) is None

    def test_lateness_by_second_of_the_due(self) -> None:
        dues_ms = np.array([2_500.0, 1_000.0, 2_000.0, 4_999.9])
        first, second, last = by_second(dues_ms, np.array([3.0, 1.0, 5.0, 7.0]))
        assert (first.second, first.messages, first.max_ms) == (1, 1, 1.0)
        assert (second.second, second.messages, second.p50_ms) == (2, 2, 4.0)
        assert last.second == 4
        assert by_second(dues_ms[:0], dues_ms[:0]) == []


def test_pace_sends_all_and_not_too_early() -> None:
    started_at = time.monotonic()
    sent = 0
    for batch in paced(1_000, 0.2):
        sent += batch
        assert sent <= (time.monotonic() - started_at) * 1_000 + 1
    assert sent == 200


def test_a_call_costs_what_is_used_beyond_the_messages_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter([(0.0, 0.0), (2.0, 0.2), (12.0, 6.2), (22.0, 17.2)])  # seconds, CPU seconds
    monkeypatch.setattr(Spent, "_now", lambda _: next(moments))
    spent = Spent(cast("Watch", None))
    for moment in (SENDS, CALLS, ENDS):
        assert spent.cpu_us(1_000) is None, "a load without calls"
        spent.note(moment)
    costs = spent.cpu_us(1_000)
    assert costs is not None
    assert [round(costs[of]) for of in ("message", "call")] == [500, 500]


def test_a_value_has_its_length() -> None:
    assert len(value_of(1_800_000_000_000_000)) == 200


def test_what_is_measured_if_nothing_is_named_exists() -> None:
    assert set(USUAL) <= set(WORKLOADS)


def part(messages: int, p50_ms: float) -> Part:
    used = {
        "n1 server": Usage(2.0, 800),
        "n2 server": Usage(1.0, 400),
        "n1 cleaner": Usage(0.5, 100),
        "sender ours": Usage(0.5, 300),
        "secure n1 server": Usage(4.0, 800),
        "secure sender ours": Usage(1.0, 300),
        "broker": Usage(3.0, 900),
        "consumer": Usage(1.0, 900),
    }
    dues_ms = np.arange(messages) * 10.0 + 1_000
    late_ms = np.full(messages, p50_ms)
    cpu = {name: each.cpu_s / 10 for name, each in used.items()}
    return Part(
        Sent(messages, 10.0),
        10.0,
        messages,
        Spread.of(late_ms.tolist()),
        by_second(dues_ms, late_ms),
        float(dues_ms[-1] + p50_ms),
        used,
        [(float(second), cpu) for second in range(1, 11)],
        {"n1": 100, "n2": 0},
        Cost({"n1": node_cost()}, 0.6),
    )


def test_figures_for_people_and_for_browsers(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"plain": 5.0, "floor": 20.0, "ours": 30.0, "secure": 31.0}
    rounds = [{kind: as_document(part(1_000, ms)) for kind, ms in kinds.items()}] * 2
    workload = {
        "name": "steady-100",
        "description": "lateness",
        "nodes": 2,
        "warmth_ms": [9.0, 8.0],
        "filled": [],
        "rounds": rounds,
        "void": ["elections 1"],
        "ratios": compared(rounds),
    }
    document = {
        "machine": {"cpus": 2, "platform": "linux"},
        "value_bytes": 200,
        "workloads": [workload],
    }
    print_report(document)
    reported = re.sub(r" +", " ", capsys.readouterr().out)
    for words in (
        "all of ours, the SDK included: 40.0% of a core",
        "all of ours, the SDK included: 50.0% of a core",
        "cpu_share / without 1.25",
        "p50_ms - without 1.00",
        "origin 8.0, mirror 4.0, SDK 3.0",
        "elections 1",
        "p50_ms / floor",
        "1.50",
        "2000.0",
    ):
        assert words in reported
    page = page_of(document)
    assert len(page.findall(".//svg")) == 2
    assert len(page.findall(".//rect[@class='c1']")) == 2 * 4 * 10


def test_what_viewers_cost_and_a_browser_shows(capsys: pytest.CaptureFixture[str]) -> None:
    one = part(1_000, 5.0)
    one.used["web"] = Usage(0.2, 9)
    rounds = [{kind: as_document(one) for kind in ("ours", "watched", "crowd")}]
    tab = {"heap_bytes": 1_000_000, "process_bytes": 2_000_000}
    workload = {
        "name": "web",
        "description": "the page",
        "nodes": 2,
        "warmth_ms": [],
        "filled": [],
        "rounds": rounds,
        "void": [],
        "ratios": compared(rounds),
        "memory_bytes": {"ours": [1_000], "crowd": [2_000]},
        "unread": {"seconds": 5.0, "closed": 3, "more_bytes": 4_096},
        "browsed": {
            "painted_ms": {"now": 120.4},
            "bytes": 60_000,
            "first_page_ms": 81.0,
            "pages": 1_000,
            "to_the_end_s": 30.0,
            "tab": {"before": tab, "after": tab},
        },
    }
    print_report({"workloads": [workload]})
    reported = re.sub(r" +", " ", capsys.readouterr().out)
    for words in (
        "p99_ms / nobody looks, crowd 1.00",
        "delaywheel, 32 viewers 2.00% 75.0% 2,000",
        "closed 3 times, 4,096 bytes more at most",
        "first paint, ms: now 120; 60,000 bytes in all",
        "the first page after 81 ms, 1,000 pages within 30 s",
        "memory of the tab after: heap 1,000,000 bytes, its process alone 2,000,000",
    ):
        assert words in reported


def test_each_process_is_drawn_once() -> None:
    used = {"n1 server": 1.0, "n1 cleaner": 2.0, "n1 node": 64.0, "broker": 4.0}
    others = {"sender ours": 8.0, "sender plain": 16.0, "consumer": 32.0}
    assert stack(used | others) == [4.0, 1.0, 2.0, 8.0, 16.0, 32.0]
