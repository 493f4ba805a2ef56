"""Drills about wheels that a start has found and that cannot be verified for a while.

A medium that refuses to be read makes a node try again ten seconds later.
"""

from __future__ import annotations

from sim.drills.script import FOREVER_MS, Drills, Script

VERIFYING = Drills()


def _refuse(script: Script, at_ms: int, node: str, wheel: str) -> None:
    """The next try to recover a wheel fails."""
    path_part = f"{wheel}/meta.json"  # which is read at the start, and again to recover the wheel
    script.do(at_ms, "disk_error", node=node, operation="read", path_part=path_part, countdown=1)


@VERIFYING(r"b +starts", r"client +cancels m\d+ at a", r"closes c\.1 at")
def unverified_answer(script: Script) -> None:
    """The only living holder of acknowledged frames is asked before it knows them itself."""
    script.mute(2_400, "Frames", "c", "a", ms=13_000)
    script.mute(2_400, "Fetch", "a", "bc", ms=13_000)
    numbers = [
        script.send(at_ms, "c", delay_ms=23_000, patience_ms=500)
        for at_ms in range(2_600, 4_000, 150)
    ]
    script.do(4_400, "absence", node="c", ms=26_000)
    at_ms = script.about(4_450)
    script.do(at_ms, "kill_server", node="b")
    for again_ms in (1, 9_000):
        _refuse(script, at_ms + again_ms, "b", "c.1")
    for number in numbers:
        script.cancel(script.about(6_000, 6_000), number, "a")
    script.until_ms = 29_000


@VERIFYING(
    r"a +starts", r"a +failed VerifyWheel\(wheel=c\.1\)", r"init .* epoch 1", r"delivers m\d+ c\.1"
)
def unverified_leader(script: Script) -> None:
    """Messages already taken fall due, and the leader's node does not know what it has lost."""
    for at_ms in range(4_000, 4_600, 25):
        due_ms = 9_000 + script.random.randrange(5_000)
        script.send(at_ms, "c", delay_ms=due_ms - at_ms, patience_ms=500)
    for node in "bc":
        script.do(4_600, "kafka_cut", node=node, ms=FOREVER_MS)
    at_ms = script.about(4_650, 50)
    script.do(at_ms, "crash_machine", node="a", ms=300)
    _refuse(script, at_ms + 1, "a", "c.1")
    script.until_ms = 22_000
