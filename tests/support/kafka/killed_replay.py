"""A replay in a separate process, which is killed by kill -9 at a step.

    python killed_replay.py BOOTSTRAP TOPIC STEP NUMBER

It dies right before the call that the step names is made for that time; `-after` it: right behind.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from confluent_kafka import Producer

from delaywheel.deadletters import DeadLetterTopic, Selection, writing

STEPS = (
    "init_transactions-after",
    "begin_transaction",
    "produce",
    "flush-after",
    "commit_transaction",
    "commit_transaction-after",
)


def main(bootstrap: str, topic: str, step: str, number: int) -> None:
    """Replays all letters, as far as it gets."""
    call, _, after = step.partition("-")
    left = number

    class Killed(Producer):
        """A writer that dies at that step."""

        def __getattribute__(self, name: str) -> Any:
            real = super().__getattribute__(name)
            if name != call:
                return real

            def counted(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0 and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*arguments, **named)
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return counted

    vars(writing)["Producer"] = Killed
    with DeadLetterTopic(topic, {"bootstrap.servers": bootstrap}) as letters:
        letters.replay(Selection())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
