"""How many lines of a kind are logged, whatever strangers send."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from delaywheel_replica.process.inheritance import STDERR_FD_VARIABLE
from delaywheel_replica.process.line_limit import LINES_A_MINUTE, MINUTE_S, LineLimit
from delaywheel_replica.process.plain_log import ChildOutput, PlainLog

SAID = """
import logging, time
from delaywheel_replica.process import line_limit, logs
logs.set_up_logging("server", node="n1", cluster="shop", log_format=FORMAT, level="info")
library, ours = logging.getLogger("library"), logs.get_logger("ours")
for number in range(200):
    library.error("Invalid encoding on %s", f"{number} " + "x" * 9_000)
    logs.stranger_refused("peer_listen", "MALFORMED", f"{number} is no node")
    logs.stranger_refused("peer_listen", "TLS_REFUSED", "always the same")
    ours.warning("disk refuses", number=number)
library.error("another kind")
try:
    raise ValueError("y" * 100_000)
except ValueError:
    library.exception("failed")
    logs.limited().exception("call failed")
"""


def test_a_kind_of_line_has_so_many_a_minute_and_the_others_are_told() -> None:
    now_s = 5.0
    limit = LineLimit(lambda: now_s)
    taken = [number for number in range(100) if limit.take("a", f"line {number}")]
    assert taken == [*range(LINES_A_MINUTE)]
    assert limit.take("b", "line")
    assert not limit.take("b", "line"), "the same again"
    assert limit.counted() == {}
    assert limit.due_s == now_s + MINUTE_S
    now_s += MINUTE_S
    assert limit.counted() == {"a": 100 - LINES_A_MINUTE, "b": 1}
    assert limit.take("a", "line 0")
    assert limit.due_s is None


def test_kinds_that_strangers_make_up_are_one() -> None:
    limit = LineLimit(lambda: 0.0)
    taken = sum(limit.take(f"kind {number}", f"{number}") for number in range(10_000))
    assert taken < 50
    assert sum(limit.counted(ended=True).values()) == 10_000 - taken


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_strangers_cause_is_limited_in_a_process_and_nothing_else(log_format: str) -> None:
    read_fd, write_fd = os.pipe()
    program = subprocess.Popen(
        [sys.executable, "-c", SAID.replace("FORMAT", repr(log_format))],
        env={**os.environ, STDERR_FD_VARIABLE: str(write_fd)},
        pass_fds=[write_fd],
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as written:
        lines = written.read().splitlines()
    assert program.wait(60) == 0
    assert sum("disk refuses" in line for line in lines) == 200, "ours are all there"
    assert sum("Invalid encoding" in line for line in lines) == LINES_A_MINUTE + 1
    assert sum("is no node" in line for line in lines) == LINES_A_MINUTE
    assert sum("always the same" in line for line in lines) == 1
    assert sum("another kind" in line for line in lines) == 1
    assert sum("call failed" in line for line in lines) == 1
    assert max(map(len, lines)) < 13_000
    told = [line for line in lines if "lines left out" in line]
    for kind, count in (
        ("library: Invalid encoding on %s", 200 - LINES_A_MINUTE),
        ("stranger refused peer_listen MALFORMED", 200 - LINES_A_MINUTE),
        ("stranger refused peer_listen TLS_REFUSED", 199),
    ):
        assert sum(kind in line and str(count) in line for line in told) == 1, (kind, told)
    if log_format == "json":
        assert {json.loads(line)["process"] for line in lines} == {"server"}


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_grpc_says_is_limited_by_its_source_and_controls_no_terminal(
    log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    output = ChildOutput("server", PlainLog({"log_format": log_format}))
    for number in range(100):
        parsing = f"E1129 12:04:41.0 5951 hpack_parser.cc:1048] Error of {number} \x1b[2J\x9b\r"
        os.write(output.write_fd, f"{parsing}{'x' * 9_000}\n".encode())
        output.pass_on()
    dump = "Fatal Python error: Aborted\n" + "".join(
        f"Thread {number} (most recent call first):\n  File x\n" for number in range(50)
    )
    os.write(output.write_fd, dump.encode())
    output.pass_on(ended=True)
    said = capfd.readouterr().err
    lines = said.splitlines()
    assert sum("Error of" in line for line in lines) == LINES_A_MINUTE
    assert (
        sum(
            f"={100 - LINES_A_MINUTE}" in line or f": {100 - LINES_A_MINUTE}" in line
            for line in lines
            if "lines left out" in line
        )
        == 1
    )
    assert said.count("most recent call first") == 50, "last words are all there"
    assert max(map(len, lines)) < 2_500
    assert not {"\x1b", "\x9b", "\r"} & {*said}
