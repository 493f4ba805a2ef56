"""The parts of scripts/chaos: gaps between arrivals, traffic, missing messages, figures."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.chaos.disturbing import Disturber, How
from local.chaos.figures import Disturbance, Summary, as_json, print_summaries
from local.chaos.run import main, order_of
from local.chaos.transactions import OpenTransactions
from local.loopback.machine import CpuTime, load_1min
from local.loopback.node import Node
from local.stage import wholeness
from local.stage.gaps import Gap, longest_gap, usual_spacing_ms
from local.stage.mirrors import Mirrors
from local.stage.stage import Ended, Stage
from local.stage.tally import Tally
from local.stage.traffic import LEAD_S, burst, steady
from local.stage.view import PlainView
from local.stage.wholeness import look
from support.services.waiting import wait_until


def test_longest_gap_is_reported_with_its_end() -> None:
    assert longest_gap([0, 20, 1_500, 1_520, 1_540]) == Gap(1_480, 1_500)
    assert longest_gap([7]) == Gap(0, 7)


def test_usual_spacing_is_the_median_of_what_came_apart() -> None:
    assert usual_spacing_ms([0, 20, 20, 20, 40, 60, 900]) == 20
    assert usual_spacing_ms([5, 5]) == 0


def test_steady_traffic_has_even_dues_and_is_in_the_order_of_sending() -> None:
    planned = list(itertools.islice(steady(50, random.Random(1)), 2_000))
    sent = [one.send_after_s for one in planned]
    assert sent == sorted(sent)
    ahead = [one.due_after_s - one.send_after_s for one in planned]
    assert min(ahead) >= LEAD_S[0] - 1e-9
    assert max(ahead) <= LEAD_S[1] + 1e-9
    # All that is due before the last ones could be sent is there, and 20 ms apart.
    dues = sorted(one.due_after_s for one in planned)[:1_000]
    assert dues == pytest.approx([LEAD_S[1] + n * 0.02 for n in range(1_000)])


def test_burst_is_due_in_one_moment() -> None:
    planned = burst(100, 4.0, random.Random(1))
    assert {(one.send_after_s, one.due_after_s) for one in planned} == {(0.0, 4.0)}
    assert len(planned) == 100


def test_all_means_so_many_of_each_kind() -> None:
    mixed = order_of(["all"], 20, random.Random(1), brokers=3)
    assert {how: mixed.count(how) for how in How} == dict.fromkeys(How, 20)
    assert mixed != sorted(mixed)
    assert How.LEADERS not in order_of(["all"], 20, random.Random(1)), "one broker leads all"
    assert order_of(["node", "node"], 2, random.Random(1)) == [How.NODE, How.NODE]


def answer_of(node: str) -> pb.DescribeClusterResponse:
    """A node's report while nothing is missing."""
    members = ("n1", "n2")
    answer = pb.DescribeClusterResponse(
        node=node,
        leader=pb.Leader(node="n2", epoch=17),
        members=[
            pb.Member(node=name, reachable=True, accepting=True, complete=True) for name in members
        ],
        wheels=[
            pb.WheelStatus(wheel=f"{name}.4", node=name, state=pb.WHEEL_STATE_OPEN)
            for name in members
        ],
    )
    own = next(row for row in answer.wheels if row.node == node)
    own.in_sync.extend(members)
    return answer


class Answers:
    """Gives the reports of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [
            Node(f"n{n}", folder, port=n, peer_port=10 + n, metrics_port=20 + n) for n in (1, 2)
        ]
        self.of: dict[str, pb.DescribeClusterResponse | None] = {
            node.address: answer_of(node.id) for node in self.nodes
        }

    def second(self) -> pb.DescribeClusterResponse:
        """The second node's report, to be changed."""
        answer = self.of[self.nodes[1].address]
        assert answer is not None
        return answer

    def missing(self) -> str:
        return "; ".join(look(self.nodes).missing)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    made = Answers(tmp_path)
    monkeypatch.setattr(Node, "is_up", property(lambda _: True))
    monkeypatch.setattr(wholeness, "described", lambda address: made.of[address])
    return made


def test_whole_cluster_lacks_nothing(answers: Answers) -> None:
    assert look(answers.nodes) == ("n2", 17, ())


def test_silent_node_is_missing(answers: Answers) -> None:
    answers.of[answers.nodes[0].address] = None
    assert answers.missing() == "n1 does not answer"


def test_node_without_leader_is_missing(answers: Answers) -> None:
    answers.second().ClearField("leader")
    assert answers.missing() == "n2 knows no leader"


def test_nodes_that_see_different_leaders_are_missing(answers: Answers) -> None:
    answers.second().leader.epoch = 18
    assert answers.missing() == "leaders: [(17, 'n2'), (18, 'n2')]"
    assert look(answers.nodes).epoch == 18


@pytest.mark.parametrize("what", ["reachable", "accepting", "complete"])
def test_member_that_is_not_all_right_is_missing(answers: Answers, what: str) -> None:
    setattr(answers.second().members[0], what, False)
    assert answers.missing() == "n2 sees n1 away, draining or incomplete"


def test_member_that_is_behind_is_missing(answers: Answers) -> None:
    answers.second().wheels[1].in_sync.remove("n1")
    assert answers.missing() == "not in sync with n2's wheel: n1"


def disturbance(how: How, silence_ms: float, *, open_records: int | None = None) -> Disturbance:
    return Disturbance(
        how=how,
        node="n1",
        leader_after="n2",
        struck_at_ms=1e12,
        silence_ms=silence_ms,
        calm_silence_ms=30,
        spacing_ms=20,
        whole_after_s=4,
        open_records=open_records,
        load_1min=1.5,
        cpu_busy_share=0.5,
    )


def test_figures_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    done = [
        disturbance(How.TRANSACTION, 1_234, open_records=500),
        disturbance(How.NODE, 1_000),
        disturbance(How.TRANSACTION, 2_468, open_records=0),
    ]
    node, transaction = Summary.of_each(done)
    assert (node.how, node.silence.messages, node.silence.max_ms) == (How.NODE, 1, 1_000)
    assert (transaction.silence.p50_ms, transaction.not_caught_open) == (1_851, 1)
    print_summaries([node, transaction])
    reported = capsys.readouterr().out
    for part in ("node", "1,851", "2,468", "50%", "transaction: 1 times no transaction was open"):
        assert part in reported
    assert "500 records uncommitted: 1,234 ms without" in done[0].line()


def test_json_is_json_and_says_whether_all_was_kept() -> None:
    ended = Ended(Tally().verdict([]), Mirrors(3, 1, 5, (Path("n1.1/5.slot"),)))
    found = json.loads(json.dumps(as_json([disturbance(How.PAUSE, 9)], ended, is_complete=True)))
    assert found["clean"] is False
    assert found["recovered_always"] is True
    assert found["disturbances"][0]["how"] == "pause"
    assert found["mirrors"]["differing"] == ["n1.1/5.slot"]


def test_open_transactions_are_unknown_until_the_client_knows_the_broker_again() -> None:
    """A broker that was killed has another epoch, and refuses questions with the former one."""
    looked: list[str] = []

    class Stale:
        def list_offsets(self, *_: object, **__: object) -> NoReturn:
            raise KafkaException(KafkaError(KafkaError.FENCED_LEADER_EPOCH))

        def list_topics(self, *_: object, **__: object) -> None:
            looked.append("again")

    transactions = OpenTransactions("127.0.0.1:1", "t", 1)
    transactions._client = cast("Any", Stale())
    assert transactions.records() == 0
    assert looked == ["again"]


class Interrupted:
    """A stage on which somebody presses Ctrl-C as soon as there is something to wait for."""

    def __init__(self, waited: Callable[[], object]) -> None:
        self._waited = waited
        self.cluster = SimpleNamespace(kafka="127.0.0.1:1", nodes=[])
        self.view = PlainView(figures_every_s=10.0)

    def wait(self, _seconds: float) -> NoReturn:
        self._waited()
        raise KeyboardInterrupt


def test_a_leader_that_is_stopped_goes_on_when_the_run_is_interrupted() -> None:
    """What is stopped never ends, whoever asks it to."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:

        def state() -> str:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0]

        def is_stopped() -> bool:
            return state() == "T"

        stage = Interrupted(lambda: wait_until("it is stopped", is_stopped))
        leader = SimpleNamespace(
            node=SimpleNamespace(id="n1", pids=lambda _names: [process.pid]), epoch=7
        )
        with pytest.raises(KeyboardInterrupt):
            Disturber(cast("Stage", stage), random.Random(1))._pause(cast("Any", leader))
        try:
            wait_until("it goes on", lambda: not is_stopped())
        finally:
            process.kill()


def test_an_interrupted_run_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("local.chaos.run.run", interrupted)
    monkeypatch.setattr("local.loopback.child._interrupted", [])
    try:
        assert main(["--plain"]) == 130
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def test_machine_has_cpu_time_and_a_load() -> None:
    cpu = CpuTime()
    sum(range(2_000_000))
    assert 0 <= cpu.busy_share() <= 1
    assert load_1min() >= 0


@pytest.mark.parametrize("arguments", [["--kills", "0"], ["--how", "gently"], ["--rate", "0"]])
def test_wrong_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: scripts/chaos" in capsys.readouterr().err
