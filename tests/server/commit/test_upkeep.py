"""Looks after the disk: ending it does not wait for a checkpoint, unless asked to."""

from __future__ import annotations

import threading

from delaywheel_replica.server.commit.upkeep import Upkeep


def test_a_node_that_stops_is_held_up_by_no_checkpoint() -> None:
    begun, may_end = threading.Event(), threading.Event()
    done = list[str]()

    def checkpoint() -> None:
        begun.set()
        may_end.wait(60)
        done.append("checkpoint")

    upkeep = Upkeep(look=lambda: None, checkpoint=checkpoint, written=lambda: 1)
    upkeep.start()
    assert begun.wait(60)
    upkeep.end()
    assert done == []
    may_end.set()
    upkeep.stop()
    assert done == ["checkpoint"]
