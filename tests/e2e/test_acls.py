"""A node with exactly the ACLs that docs/KAFKA.md lists, and with one of them taken away."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import ResourceType  # type: ignore[attr-defined] # missing in its stubs

from delaywheel import (
    CancelOutcome,
    Client,
    Message,
    MessageState,
    Reason,
    RefusedError,
    ingress,
)
from delaywheel.deadletters.selection import Selection
from delaywheel.deadletters.topic import DeadLetterTopic
from delaywheel.transactions import Half
from delaywheel_replica.cleaner.kafka.brokers import VERIFICATION
from delaywheel_replica.judging.verdict import ClusterState, ClusterVerdict, verdict
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.cluster import LocalCluster, described
from local.loopback.node import Node
from local.loopback.shared import JoinedBroker
from support.clients.command import Command
from support.kafka.read_committed import (
    PATIENCE_S,
    CommittedReader,
    create_topic,
    headers_of,
    read_all,
    topic_exists,
)
from support.kafka.rights import Rights, documented
from support.services.ingress import Sender
from support.services.trio import NO_METRICS
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

_OWN = uuid.uuid4().hex[:8]
CLUSTER = f"guarded{_OWN}"
NAMES = KafkaNames(CLUSTER)
INGRESS = ingress.ingress_topic(CLUSTER)
ORDERS, MORE = f"orders-{_OWN}", f"more-{_OWN}"
OURS = {"`ingress_topics`": MORE, "destination topics": ORDERS}
SOON = (ingress.DELAY_MS, b"300")


@pytest.fixture(scope="module")
def rights(kafka: JoinedBroker) -> Iterator[Rights]:
    for topic in OURS.values():
        create_topic(kafka.address, topic)
    with Rights.of(kafka) as rights:
        rights.allow_all(documented(CLUSTER, OURS))
        yield rights


@pytest.fixture(scope="module")
def node(rights: Rights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = {
        "cluster_id": CLUSTER,
        "ingress_topics": [MORE],
        "kafka": rights.user_settings,
        **NO_METRICS,
    }
    folder = tmp_path_factory.mktemp("cluster")
    with LocalCluster(kafka=rights.address, folder=folder, settings=settings) as cluster:
        cluster.wait_until_accepting()
        yield cluster.nodes[0]


@pytest.fixture
def reader(rights: Rights) -> Iterator[CommittedReader]:
    with CommittedReader(rights.address, ORDERS) as running:
        running.read_to_end()
        yield running


@pytest.fixture
def sender(rights: Rights, node: Node) -> Sender:
    wait_until("there is an ingress topic", lambda: topic_exists(rights.address, INGRESS))
    wait_until("nothing is wrong with it", lambda: not faults(node))
    return Sender(rights.address, CLUSTER)


def faults(node: Node) -> list[str]:
    """What the node says of ingress."""
    answer = wait_until("it answers", lambda: described(node.address, details=True))
    return [fault for member in answer.members for fault in member.report.ingress_faults]


def values(reader: CommittedReader, count: int) -> set[bytes]:
    """Returns the messages that came, once there are this many more."""
    before = len(reader.messages)
    return {one.value() or b"" for one in reader.wait_for(before + count)[before:]}


def test_what_is_listed_is_enough(
    rights: Rights, node: Node, sender: Sender, reader: CommittedReader
) -> None:
    with Client(node.address) as client:
        handle = client.produce(ORDERS, b"by gRPC", delay=timedelta(milliseconds=300))
        sender.send(ORDERS, b"by ingress", SOON)
        sender.flush()
        more = Sender(rights.address, CLUSTER, further=MORE)
        more.send(ORDERS, b"by more", SOON)
        more.flush()
        assert values(reader, 3) == {b"by gRPC", b"by ingress", b"by more"}
        found = wait_until("it is found", lambda: client.get(handle, find_place=True))
        assert found.place is not None
    wait_until("the group shows it", lambda: shown(rights) == 1)
    assert not faults(node)
    assert "uthoriz" not in node.log.read_text()


def unfit(rights: Rights, command: Command, data_dir: Path, *more: str) -> dict[str, str]:
    """What `config check --connect` says is to be done in Kafka."""
    settings = {
        "cluster_id": CLUSTER,
        "node_id": "n9",
        "data_dir": data_dir,
        "ingress_topics": MORE,
    }
    kafka = {f"kafka.{name}": value for name, value in rights.user_settings.items()}
    flags = [f"--set={name}={value}" for name, value in (settings | kafka).items()]
    flags += [f"--set={setting}" for setting in more]
    ended = command("config", "check", "--connect", "--json", "--topic", ORDERS, *flags)
    return {
        item["what"]: item["advice"]
        for item in ended.document["items"]
        if item["level"] != "ok" and item["what"].startswith(("topic", "group", "trans", "broker"))
    }


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def shown(rights: Rights) -> int:
    """Offsets of the ingress topic that its group has passed."""
    group = Consumer({"bootstrap.servers": rights.address, "group.id": NAMES.ingress_group})
    partitions = group.list_topics(INGRESS, timeout=PATIENCE_S).topics[INGRESS].partitions
    committed = group.committed(
        [TopicPartition(INGRESS, n) for n in partitions], timeout=PATIENCE_S
    )
    group.close()
    return sum(max(one.offset, 0) for one in committed)


def test_an_ingress_topic_that_is_closed_is_named_and_stops_halves_alone(
    rights: Rights, node: Node, sender: Sender, reader: CommittedReader
) -> None:
    """What a group answers of a half comes by this topic."""
    rights.deny(ResourceType.TOPIC, INGRESS, "READ")
    wait_until("it is named", lambda: any(INGRESS in fault for fault in faults(node)))
    assert INGRESS in node.log.read_text()
    sender.send(ORDERS, b"by ingress", SOON)
    sender.flush()
    with Client(node.address) as client:
        client.produce(ORDERS, b"by gRPC", delay=timedelta(milliseconds=300))
    more = Sender(rights.address, CLUSTER, further=MORE)
    more.send(ORDERS, b"by more", SOON)
    more.flush()
    assert values(reader, 2) == {b"by gRPC", b"by more"}
    with Client(node.address) as client:
        refused = wait_until("halves are refused", lambda: begin_refused(client), timeout_s=60)
        assert (refused.reason, refused.outcome_known) == (Reason.HALVES_UNAVAILABLE, True)
        assert INGRESS in str(refused)
        rights.give_back(ResourceType.TOPIC, INGRESS)
        assert values(reader, 1) == {b"by ingress"}
        wait_until("halves are taken", lambda: not begin_refused(client), timeout_s=60)


def begin_refused(client: Client) -> RefusedError | None:
    """Why no half is begun; None: one was, and is rolled back."""
    try:
        client.begin(ORDERS, b"half", group="shop", hold="9s").rollback()
    except RefusedError as refused:
        return refused
    return None


def test_an_outcomes_topic_that_is_closed_is_named_and_no_message_dies_for_it(
    rights: Rights, node: Node, reader: CommittedReader
) -> None:
    """Transactions with an outcome fail, and the guards of the searches that follow as well."""
    soon = timedelta(seconds=10)  # time to cancel one and deny its outcome, which is due with it
    with Client(node.address) as client:
        withdrawn = client.produce(ORDERS, b"withdrawn", delay=soon)
        assert client.cancel(withdrawn).outcome is CancelOutcome.CANCELLED
        rights.deny(ResourceType.TOPIC, NAMES.outcomes, "WRITE")
        sent = [Message(ORDERS, b"%d" % number, delay=soon) for number in range(20)]
        assert all(result.handle for result in client.produce_many(sent))
    named = f"not allowed to write to topic {NAMES.outcomes}"
    wait_until("it is down", lambda: told(node).state is ClusterState.DOWN)
    wait_until("it is named", lambda: any(named in cause.text for cause in told(node).causes))
    rights.give_back(ResourceType.TOPIC, NAMES.outcomes)
    assert values(reader, 20) == {message.value for message in sent}
    wait_until("all is well", lambda: told(node).state is ClusterState.OK)
    assert not read_all(rights.address, NAMES.dead)


def test_a_halves_topic_that_is_closed_stops_halves_alone_and_nothing_is_decided(
    rights: Rights, node: Node, reader: CommittedReader
) -> None:
    def begun(text: bytes, hold: str = "9s") -> Half:
        return client.begin(ORDERS, text, group="shop", hold=hold)

    with Client(node.address) as client:
        committed, asked = begun(b"committed"), begun(b"asked", "5s")
        rights.deny(ResourceType.TOPIC, NAMES.halves, "WRITE")  # before anything is asked
        client.produce(ORDERS, b"plain", delay=timedelta(milliseconds=5_500))
        committed.commit()
        assert values(reader, 2) == {b"committed", b"plain"}
        right = f"not allowed to write to topic {NAMES.halves}: grant Write on it"
        wait_until("it is named", lambda: any(right in cause.text for cause in told(node).causes))
        with pytest.raises(RefusedError, match="grant Write on it") as refused:
            begun(b"refused")
        assert refused.value.reason is Reason.HALVES_UNAVAILABLE
        found = wait_until("it is found", lambda: client.get(asked.handle, find_place=True))
        assert (found.state, found.dead_reason) == (
            MessageState.DEAD_LETTERED,
            "HALVES_UNAVAILABLE",
        )
        rights.give_back(ResourceType.TOPIC, NAMES.halves)
        with DeadLetterTopic(NAMES.dead, {"bootstrap.servers": rights.address}) as letters:
            assert letters.replay(Selection(reason="HALVES_UNAVAILABLE")).done == 1
        # A half of another test is there if its rollback came too late.
        wait_until("the replay is visible", lambda: asked_about(rights).count(asked.id) == 1)
        assert committed.id not in asked_about(rights)
        wait_until("halves are taken", lambda: told(node).state is ClusterState.OK, timeout_s=60)
        begun(b"last").rollback()


def asked_about(rights: Rights) -> list[bytes]:
    """The ids of the halves whose groups were asked."""
    letters = read_all(rights.address, NAMES.halves)
    return [bytes.fromhex((dict(headers_of(each))["dw-id"] or b"").decode()) for each in letters]


def told(node: Node) -> ClusterVerdict:
    """What the node says of the cluster."""
    return verdict(wait_until("it answers", lambda: described(node.address, details=True)))


def test_without_a_right_to_the_brokers_settings_they_are_checked_by_hand(
    rights: Rights, command: Command, tmp_path: Path
) -> None:
    cluster = f"{CLUSTER}-hosted"  # its names have the prefix that the rights are for
    rights.allow(ResourceType.GROUP, f"delaywheel-{cluster}-reader", "DESCRIBE", prefixed=False)
    rights.deny(ResourceType.BROKER, "kafka-cluster", "DESCRIBE_CONFIGS")
    advice = unfit(rights, command, tmp_path / "n9")["broker 1"]
    assert advice.endswith("check_brokers = false")
    by_hand = unfit(rights, command, tmp_path / "n9", "check_brokers=false")
    assert by_hand == {"brokers": f"see that each has {VERIFICATION}=true"}
    settings = {
        "cluster_id": cluster,
        "kafka": rights.user_settings,
        "check_brokers": False,
        "ingress": False,
        **NO_METRICS,
    }
    with LocalCluster(kafka=rights.address, folder=tmp_path, settings=settings) as hosted:
        hosted.wait_until_accepting()
        (member,) = wait_until(
            "it answers", lambda: described(hosted.nodes[0].address, details=True)
        ).members
        assert "check_brokers = false" in member.report.unchecked
    rights.give_back(ResourceType.BROKER, "kafka-cluster")


def test_a_group_that_is_closed_is_reported_and_stops_nothing(
    rights: Rights, node: Node, sender: Sender, reader: CommittedReader
) -> None:
    rights.deny(ResourceType.GROUP, NAMES.ingress_group, "READ")
    sender.send(ORDERS, b"by ingress", SOON)
    sender.flush()
    assert values(reader, 1) == {b"by ingress"}
    # It has the ingress topic's name.
    fault = "not allowed to show how far ingress is"
    wait_until("it is logged", lambda: fault in node.log.read_text())
    rights.give_back(ResourceType.GROUP, NAMES.ingress_group)


@pytest.mark.usefixtures("node")
def test_a_check_finds_them_enough_and_names_what_is_taken_away(
    rights: Rights, command: Command, tmp_path: Path
) -> None:
    """Comes last: for half a minute the node says of a topic of records that it was closed."""
    assert not unfit(rights, command, tmp_path)
    for topic, right in ((NAMES.dead, "Write"), (ORDERS, "Read"), (INGRESS, "Read")):
        rights.deny(ResourceType.TOPIC, topic, right.upper())
        assert unfit(rights, command, tmp_path) == {f"topic {topic}": f"grant {right} on it"}
        rights.give_back(ResourceType.TOPIC, topic)
    rights.deny(ResourceType.GROUP, NAMES.ingress_group, "READ")
    what = f"group {NAMES.ingress_group}"
    assert unfit(rights, command, tmp_path) == {what: "grant Read on it"}
    rights.give_back(ResourceType.GROUP, NAMES.ingress_group)
