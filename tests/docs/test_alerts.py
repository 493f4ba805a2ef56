"""docs/alerts.yaml: its rules name metrics that there are, and promtool sees each of them come."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest

from delaywheel_replica.config_sources import load_config
from delaywheel_replica.judging import causes
from delaywheel_replica.judging.sections import Section, of_kafka, of_refusal
from delaywheel_replica.server.metrics.catalogue import METRICS
from delaywheel_replica.server.metrics.metric import MetricType
from delaywheel_trace.job.health import IndexHealth
from support.process.passed import skip_what_has_passed
from support.process.prometheus import find_program

DOCS = Path(__file__).parents[2] / "docs"
RULES = (DOCS / "alerts.yaml").read_text(encoding="utf-8")
TESTS = (DOCS / "alerts.test.yaml").read_text(encoding="utf-8")
RUNBOOK = (DOCS / "RUNBOOK.md").read_text(encoding="utf-8")
CAUSES = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for row in RUNBOOK.partition("| alert (")[2].partition("\n\n")[0].splitlines()[2:]
]
"""The rows of the runbook's first table: alerts, what the status says, section."""
OF_THE_INDEX = {each.name for each in IndexHealth().registry.collect()}
"""The metrics of the job that keeps the trace's index."""


def rules() -> list[str]:
    """The text of each rule."""
    return re.split(r"^      - alert: ", RULES, flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("text", [RULES, TESTS], ids=["rules", "tests"])
def test_rules_name_metrics_that_there_are(text: str) -> None:
    known = {spec.name for spec in METRICS} | OF_THE_INDEX
    known |= {f"{spec.name}_bucket" for spec in METRICS if spec.kind is MetricType.HISTOGRAM}
    named = set(re.findall(r"\bdelaywheel_[a-z_]+", text))
    assert named
    assert named <= known


def test_labels_are_those_of_the_metrics() -> None:
    own = {"job", "le", "instance"}
    labels = {spec.name: {*spec.labels, *own} for spec in METRICS}
    labels |= dict.fromkeys(OF_THE_INDEX, own)
    for rule in rules():
        of_rule = {
            label
            for name in re.findall(r"\bdelaywheel_[a-z_]+", rule)
            for label in labels[name.removesuffix("_bucket")]
        }
        used = {
            label.strip() for by in re.findall(r"by \(([^)]*)\)", rule) for label in by.split(",")
        }
        used |= set(re.findall(r"\$labels\.(\w+)", rule))
        assert used <= of_rule, rule


def test_each_rule_says_what_to_do() -> None:
    names = [rule.partition("\n")[0] for rule in rules()]
    assert len(names) == len(set(names)) > 20
    for rule in rules():
        assert re.search(r"^ +labels: \{severity: (page|ticket)\}$", rule, re.MULTILINE), rule
        for name in ("summary", "action", "runbook_url"):
            assert re.search(rf'^ +{name}: ".+"$', rule, re.MULTILINE), rule


def test_each_alert_leads_to_the_section_that_the_runbook_names() -> None:
    of_rules = {
        rule.partition("\n")[0]: re.findall(r'runbook_url: "RUNBOOK\.md(#.+)"', rule)
        for rule in rules()
    }
    of_table = {
        f"Delaywheel{alert}": re.findall(r"\((#.+)\)", section)
        for alerts, _, section in CAUSES
        for alert in re.findall(r"`(\w+)`", alerts)
    }
    assert of_rules == of_table


def test_each_section_says_when_it_is_over() -> None:
    for *_, section in CAUSES:
        heading = re.findall(r"\[(.+)\]\((#.+)\)", section)[0][0]
        text = RUNBOOK.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        is_operators_task = heading == "Replacing a node"
        assert is_operators_task or "\n**Over when** " in text, heading


def test_each_cause_that_is_told_leads_to_the_sections_that_the_table_names() -> None:
    told = dict(filter(None, map(_told, ast.walk(ast.parse(inspect.getsource(causes))))))
    named = [
        (re.compile(re.escape(re.sub(r"[A-Z_]{4,}", "X", text)).replace("…", ".*")), heading)
        for _, shown, section in CAUSES
        for text in re.findall(r"`([^`]*(?: |…)[^`]*)`", shown)
        if text != "the control topic"
        for heading in re.findall(r"\[(.+)\]", section)
    ]
    assert len(told) > 20
    for text, section in told.items():
        headings = [heading for each, heading in named if each.fullmatch(text)]
        assert headings, text
        # What depends on what it says, `of_kafka` and `of_refusal` find.
        assert section is None or Section[section] in headings, text
    assert [each for each, _ in named if not any(map(each.fullmatch, told))] == []


def test_each_section_is_a_heading_of_the_table() -> None:
    headings = {re.findall(r"\[(.+)\]", section)[0] for *_, section in CAUSES}
    assert {*Section} <= headings


@pytest.mark.parametrize(
    ("said", "section"),
    [
        (of_kafka("topic orders: Topic authorization failed"), "No leader is elected"),
        (of_kafka("_TIMED_OUT: Failed while waiting for controller"), "Kafka is away"),
        (of_kafka("the control topic dw-control is missing"), "The control topic is missing"),
        (of_kafka("it throttles the leader to about 1,000 bytes a second"), "Kafka throttles"),
        (of_refusal("DISK_FULL", ""), "The disk is full"),
        (of_refusal("DISK_STALLED", ""), "The disk hangs"),
        (of_refusal("NO_WHEEL", "STORAGE_ROLLED_BACK: …"), "An older copy of a folder"),
        (of_refusal("DRAINING", ""), "A node takes no messages"),
    ],
)
def test_what_a_cause_says_decides_where_it_leads(said: Section, section: str) -> None:
    assert said == section


def _told(node: ast.AST) -> tuple[str, str | None] | None:
    """The text of a cause, with X for what is put in, and its section; None: it is none."""
    match node:
        case ast.Call(ast.Name("Cause"), [text, section]):
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            written = [str(p.value) if isinstance(p, ast.Constant) else "X" for p in parts]
            return "".join(written), section.attr if isinstance(section, ast.Attribute) else None
        case _:
            return None


def test_every_rule_is_seen_to_come() -> None:
    come = set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n +- exp_labels", TESTS))
    tried = set(re.findall(r"alertname: (\w+)", TESTS))
    assert come == tried == {rule.partition("\n")[0] for rule in rules()}


@pytest.mark.parametrize("command", ["check rules alerts.yaml", "test rules alerts.test.yaml"])
def test_promtool_takes_them(command: str) -> None:
    passed = skip_what_has_passed(f"promtool-{command.split(maxsplit=1)[0]}", RULES, TESTS)
    words = [find_program("promtool"), *command.split()]
    done = subprocess.run(words, cwd=DOCS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed.touch()


def test_promtool_finds_an_alert_that_does_not_come(tmp_path: Path) -> None:
    passed = skip_what_has_passed("promtool-finds", RULES, TESTS)
    (tmp_path / "alerts.yaml").write_text(RULES.replace("delaywheel_ready) < 1", "up) < 1"))
    # The other groups say nothing of this rule, and take promtool two seconds.
    head, *groups = re.split(r"^(?=  - name: )", TESTS, flags=re.MULTILINE)
    group = next(each for each in groups if "alertname: DelaywheelTakesNoMessages\n" in each)
    (tmp_path / "alerts.test.yaml").write_text(head + group)
    command = [find_program("promtool"), "test", "rules", "alerts.test.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DelaywheelTakesNoMessages" in done.stdout + done.stderr
    passed.touch()


def test_the_three_nodes_to_copy_can_run(tmp_path: Path) -> None:
    text = (DOCS / "OPERATIONS.md").read_text(encoding="utf-8")
    section = text.partition("## Three nodes, to copy\n")[2].partition("\n## ")[0]
    example = section.partition("```toml\n")[2].partition("```")[0]
    for node in ("n1", "n2", "n3"):
        file = tmp_path / f"{node}.toml"
        file.write_text(example.replace('node_id = "n1"', f'node_id = "{node}"'))
        config = load_config(file=file)
        assert config.node_id == node
        assert len(config.members) == 3
