"""docs/SIMULATION.md has a row for each answer of the protocol, and each row its mutants."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from sim.mutants.answers import ANSWERS
from sim.mutants.catalogue import MUTANTS

TABLE = (Path(__file__).parents[2] / "docs" / "SIMULATION.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| (?!call)(\w+) \| ([^|]+) \| [^|]+ \| ([^|]+) \|$",
    TABLE.partition("## What is heard")[2],
    re.MULTILINE,
)
JUDGED = {
    "Cancel": pb.CancelOutcome,
    "Reschedule": pb.RescheduleOutcome,
    "Commit": pb.CommitOutcome,
    "GetMessage": pb.MessageState,
}
NOT_JUDGED = {"GetMessage": {"UNSPECIFIED"}}


@pytest.mark.parametrize("call", sorted(JUDGED))
def test_each_answer_of_a_call_has_its_row(call: str) -> None:
    prefix = {"GetMessage": "MESSAGE_STATE_"}.get(call, f"{call.upper()}_OUTCOME_")
    named = {name.removeprefix(prefix) for name in JUDGED[call].keys()}  # noqa: SIM118 - no mapping
    rows = {answer for each, answer, _ in ROWS if each == call and answer.isupper()}
    assert rows - {"MESSAGE_NOT_FOUND"} == named - NOT_JUDGED.get(call, set())


def test_each_row_has_mutants_and_each_mutant_its_row() -> None:
    mutants = defaultdict(list)
    for call, answer, text in ROWS:
        for name in re.findall(r"`([^`]+)`", text):
            mutants[name].append((call, answer))
    assert all("`" in text for *_, text in ROWS)
    assert mutants.keys() <= MUTANTS.keys()
    assert mutants.keys() >= ANSWERS.keys()
