"""The benchmark's parts: the rate it keeps, what it reads of processes and nodes, the tables."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from local.bench import paced, process_figures
from local.bench_report import print_report
from local.scraping import Cost, NodeCost, Samples, scrape


def test_pace_sends_all_and_not_too_early() -> None:
    started_at = time.monotonic()
    sent = 0
    for batch in paced(1_000, 0.2):
        sent += batch
        assert sent <= (time.monotonic() - started_at) * 1_000 + 1
    assert sent == 200


def test_figures_of_a_process() -> None:
    """Of one that does nothing else: what this one has open hangs on the tests before."""
    opens = "import sys; print(flush=True); input(); kept = open('/dev/null'), open('/dev/null')"
    code = f"{opens}; print(flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = process_figures(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        after = process_figures(child.pid)
        child.stdin.close()
    assert before.anonymous_mib > 1
    assert after.descriptors == before.descriptors + 2


def cost_of(messages: int, *, elections: int = 0) -> dict[str, Any]:
    """A phase in which n1 took every message and n2 forwarded them."""
    server, cleaner = messages * 20e-6, messages * 30e-6
    taking = NodeCost(messages, 0, {"server": server, "cleaner": 0.0}, 0, 2, 0)
    leading = NodeCost(0, messages, {"server": 0.0, "cleaner": cleaner}, elections, 0, 0)
    cost = Cost({"n1": taking, "n2": leading}, 0.75)
    return {"messages": messages, "cost": asdict(cost)}


def test_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    lateness = {"messages": 20_000, "p50_ms": 6.0, "p99_ms": 50.0, "max_ms": 100.0}
    kinds = ("kafka", "delayed", "short")
    process = {"anonymous_mib": 40.0, "descriptors": 30}
    figures = {"n1 server": process, "n2 cleaner": process}
    of_rate = {
        "rate_per_s": 2_000,
        "sent_per_s": dict.fromkeys(kinds, 1_987),
        "lateness": dict.fromkeys(kinds, lateness),
        "ratio_p50": {"delayed": 3.0, "short": 3.5},
        "ratio_p99": {"delayed": 4.0, "short": 4.5},
        "phases": {"delayed": cost_of(20_000), "short": cost_of(20_000, elections=3)},
    }
    print_report(
        {
            "value_bytes": 200,
            "rates": [of_rate],
            "accept": {"per_s": 40_000, **cost_of(200_000)},
            "kafka_produced_per_s": 400_000,
            "idle_cpu_share": dict.fromkeys(figures, 0.034),
            "processes": {"idle": figures, "loaded": figures},
        }
    )
    told = capsys.readouterr().out
    for part in (
        *("20,000", "1,987", "3.5", "4.5", "40,000", "0.10", "200,000 messages pending"),
        *("40.0 → 40.0", "3.4%", "20.0", "30.0", "75% of the machine's CPUs used"),
        "elections 3, in-sync changes 2, restarted processes 0",
    ):
        assert part in told


STARTS = ("process_start_time_seconds", "server"), ("process_start_time_seconds", "cleaner")


def counted(
    accepted: int, elections: int, cpu_s: float, *, started: tuple[float, float] = (1, 1)
) -> Samples:
    return {
        ("accepted_messages_total", ""): accepted,
        ("elections_total", ""): elections,
        ("process_cpu_seconds_total", "server"): cpu_s,
        ("process_cpu_seconds_total", "cleaner"): cpu_s,
        **dict(zip(STARTS, started, strict=True)),
    }


def test_cost_is_what_counters_grew_by() -> None:
    cost = NodeCost.between(counted(10, 1, 5.0), counted(110, 1, 7.5))
    assert cost == NodeCost(100, 0, {"server": 2.5, "cleaner": 2.5}, 0, 0, 0)


def test_counters_of_a_process_that_was_started_anew_begin_at_zero() -> None:
    cost = NodeCost.between(counted(10, 3, 5.0), counted(110, 1, 5.5, started=(1, 2)))
    assert cost == NodeCost(100, 0, {"server": 0.5, "cleaner": 5.5}, 1, 0, 1)


def test_samples_are_read_from_a_nodes_metrics() -> None:
    page = (
        "# TYPE delaywheel_accepted_messages counter\n"
        "delaywheel_accepted_messages_total 7\n"
        "# TYPE delaywheel_process_cpu_seconds counter\n"
        'delaywheel_process_cpu_seconds_total{process="server"} 1.5\n'
        "# TYPE delaywheel_role gauge\n"
        'delaywheel_role{role="leader"} 1\n'
    )
    with metrics_page(page) as address:
        assert scrape(address) == {
            ("accepted_messages_total", ""): 7,
            ("process_cpu_seconds_total", "server"): 1.5,
        }


@contextlib.contextmanager
def metrics_page(page: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        thread.join()
