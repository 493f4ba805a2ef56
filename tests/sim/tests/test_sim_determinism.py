"""One seed is one run: in this process, in another one, under any hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sim.kafka.scenario import Toy, uneasy

TESTS = Path(__file__).parents[2]
PRINT_DIGEST = """
from sim.kafka.scenario import Toy, uneasy
toy = Toy(7, uneasy())
toy.run(30.0)
print(toy.story())
"""


def _told_with(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS)}
    return subprocess.check_output([sys.executable, "-c", PRINT_DIGEST], env=environment, text=True)


def test_a_seed_is_one_run_in_every_process() -> None:
    toy = Toy(7, uneasy())
    toy.run(30.0)
    assert len(toy.numbers()) > 100
    assert {_told_with("1"), _told_with("2")} == {toy.story() + "\n"}


def test_another_seed_is_another_run() -> None:
    stories = set()
    for seed in (7, 8):
        toy = Toy(seed, uneasy())
        toy.run(5.0)
        stories.add(toy.scheduler.digest)
    assert len(stories) == 2
