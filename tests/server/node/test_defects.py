"""A defect ends its process, wherever it occurs. Two processes, a second together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from delaywheel.reasons import Reason
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.process.defects import fatal
from delaywheel_replica.server import serving
from delaywheel_replica.server.commit.committer import Request
from delaywheel_replica.server.commit.writing import settle
from delaywheel_replica.server.node.refusals import Refusal
from delaywheel_replica.server.serving import Server
from support.wheels.messages import columns_of, message

PROGRAM = """
import threading, time
from delaywheel_replica.process.defects import end_with_any_thread, fatal

def fail():
    raise ValueError("a defect")

def swallow():
    try:
        {call}()
    except ValueError:
        pass

end_with_any_thread()
threading.Thread(target={target}, daemon=True).start()
time.sleep(60)
"""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which this process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def fail(*_: object) -> NoReturn:
    raise ValueError("a defect")


def disbelieve(*_: object) -> NoReturn:
    raise MalformedError("a seq that cannot be")


@pytest.mark.parametrize(("call", "target"), [("fail", "fail"), ("fatal(fail)", "swallow")])
def test_a_defect_ends_the_process_with_a_line_of_log(call: str, target: str) -> None:
    program = PROGRAM.format(call=call, target=target)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert "a defect" in ended.stdout + ended.stderr


def test_what_is_no_defect_goes_through(exits: list[int]) -> None:
    assert fatal(divmod)(7, 2) == (3, 1)
    assert exits == []


def test_what_an_answer_raises_on_the_loop_is_a_defect(exits: list[int]) -> None:
    settle([(Request(columns_of([message()]), Kind.MESSAGES, fail), Refusal(Reason.INTERNAL))])
    assert exits == [1]


def test_what_a_peers_message_raises_reaches_the_peers_thread(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It distinguishes an impossible message from a defect, which ends the thread, and so all."""
    given: dict[str, Callable[..., object]] = {}

    def network(*_: object, **callbacks: Callable[..., object]) -> SimpleNamespace:
        given.update(callbacks)
        return SimpleNamespace(start=lambda _: None)

    monkeypatch.setattr(serving, "PeerNetwork", network)
    server: Any = SimpleNamespace(
        _config=SimpleNamespace(
            members={"n1": "", "n2": ""},
            cluster_id="c",
            node_id="n1",
            agreed={},
            listens_for_peers="",
            token_address="",
        ),
        _access=SimpleNamespace(call_secret=b"", digest=b""),
        _store=SimpleNamespace(state=SimpleNamespace(storage="s")),
        _boot_id="b",
        _address="",
        _certificates=None,
        _peer_security=lambda: None,
        _driver=SimpleNamespace(received=disbelieve, disconnected=fail),
        _outside=SimpleNamespace(),
    )
    Server._join_peers(server)
    with pytest.raises(MalformedError):
        given["on_message"]("n2", "anything")
    with pytest.raises(ValueError, match="a defect"):
        given["on_disconnected"]("n2")
    assert exits == []


def test_a_status_fits_into_headers_whatever_it_quotes() -> None:
    """Of a longer one gRPC tells the caller nothing but that it was too long."""
    refusal = Refusal(Reason.NODE_UNKNOWN, "ä\U0001f600" * 50_000)
    assert refusal.text.endswith(refusal.reason.advice)
    assert len(refusal.as_status().SerializeToString()) < 2_500
