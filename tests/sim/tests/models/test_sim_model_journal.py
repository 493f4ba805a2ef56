"""Checks the rules of the journal: by seeds, by drills, and that each is needed."""

import dataclasses

import pytest

from sim.journal.drills import DRILLS, drilled
from sim.journal.model import JournalModel
from sim.journal.rules import RULES
from sim.journal.stage import Drill
from sim.models.catalogue import JOURNALS, exhausted, name_of

ALONE = JournalModel(members=1, min_insync=1)
PAIR = JournalModel(members=2, min_insync=1)
THREE = JournalModel()
BROKEN = {
    ("fills_when_acknowledged",): (THREE, 1),
    ("syncs_journal_first",): (PAIR, 18),
    ("announces_at_end",): (PAIR, 0),
    ("writes_at_entry",): (THREE, 4),
    ("end_covers_filled",): (THREE, 12),
    ("syncs_before_entries",): (ALONE, 3),
    ("syncs_before_checkpoint",): (ALONE, 20),
    ("saves_before_deleting",): (ALONE, 87),
    ("entries_after_copies",): (PAIR, 3),
    ("cuts_beyond_end",): (ALONE, 7),
    ("late_from_sections",): (THREE, 12),
    ("releases_by_entries",): (ALONE, 37),
    ("floor_waits_for_ledger",): (PAIR, 65),
    ("stops_when_full",): (PAIR, 9),
    ("notes_ledger", "ledger_from_sections"): (PAIR, 2),
}
"""A seed that finds what goes wrong without these rules. If the model changes, `tried` with
`runs=1_000` finds another one. Of the last two rules either is enough."""


@pytest.mark.parametrize("model", JOURNALS, ids=name_of)
def test_the_rules_hold(model: JournalModel) -> None:
    found = exhausted(model).found
    assert found.wrong is None, str(found)


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.__name__)
def test_the_rules_hold_in_drills(drill: Drill) -> None:
    assert drilled(drill) is None


@pytest.mark.parametrize("rules", BROKEN, ids="+".join)
def test_a_run_is_wrong_without_a_rule(rules: tuple[str, ...]) -> None:
    size, seed = BROKEN[rules]
    model = dataclasses.replace(size, first=seed)
    assert model.tried().wrong is None
    assert dataclasses.replace(model, rules=RULES.without(*rules)).tried().wrong is not None


@pytest.mark.parametrize(
    ("drill", "rule"), [(drill, rule) for drill, rules in DRILLS.items() for rule in rules]
)
def test_a_drill_is_wrong_without_its_rule(drill: Drill, rule: str) -> None:
    assert drilled(drill, RULES.without(rule)) is not None


def test_every_rule_is_needed() -> None:
    by_runs = {rule for rules in BROKEN for rule in rules}
    by_drills = {rule for rules in DRILLS.values() for rule in rules}
    assert by_runs | by_drills == {rule.name for rule in dataclasses.fields(RULES)}


def test_a_trace_says_what_happens() -> None:
    said: list[str] = []
    THREE.tried(said.append)
    assert any("forwarded up to" in line for line in said)
