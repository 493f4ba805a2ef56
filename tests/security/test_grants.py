"""Who may do what, on real ports: each call by each principal, and grants that change."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from delaywheel import Client, Tls
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.errors import RefusedError
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.link import TopicInfo
from delaywheel_replica.rights import withhold_names
from delaywheel_replica.server.access.needs import NEEDS
from local.loopback.kafka import free_ports
from support.peers.authority import Authority
from support.server.fake_cleaner import FakeCleaner
from support.server.server_process import CHANNEL_OPTIONS, ServerProcess
from support.services.waiting import wait_until

Answer = TypeVar("Answer")

GRANTS = """
[[grant]]
who = ["dns:admin.*"]
may = ["produce", "change", "inspect", "read", "operate"]

[[grant]]
who = ["dns:shop.example.org", "token:token-shop"]
may = ["produce", "change", "inspect"]
topics = ["orders*"]

[[grant]]
who = ["dns:viewer.example.org"]
may = ["inspect"]

[[grant]]
who = ["dns:reader.example.org"]
may = ["read"]
topics = ["orders"]

[[grant]]
who = ["dns:sender.example.org"]
may = ["produce", "change"]
topics = ["orders"]

[[grant]]
who = ["dns:ops.example.org"]
may = ["operate"]

[[grant]]
who = ["dns:metered.example.org"]
may = ["produce", "change"]

[[quota]]
who = ["dns:metered.example.org"]
messages_per_second = 4
questions_per_second = 1
in_flight_bytes = 1_000_000

[[topic_quota]]
topics = ["small"]
pending_messages = 3
pending_bytes = 100

[[topic_quota]]
topics = ["unseen"]
pending_bytes = 100
"""
DUE_MS = (time.time_ns() // 1_000_000_000 + 3_600) * 1_000
SLOT = DUE_MS // 1_000


def message(topic: str, number: int) -> pb.DelayedMessage:
    return pb.DelayedMessage(
        id=number.to_bytes(16, "big"), topic=topic, key=b"k", value=b"v", deliver_at_ms=DUE_MS
    )


class Site:
    """A node with grants, and callers with certificates of their own."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.grants, self.tokens = folder / "grants.toml", folder / "tokens.toml"
        self.put(self.grants, GRANTS)
        self.put(self.tokens, f'{sha256(b"t0ken").hexdigest()} = "token-shop"\n')
        self.authority = self._authority = authority
        (port,) = free_ports(1)
        self.token_address = f"127.0.0.1:{port}"
        cert, key = authority.sign("node", "127.0.0.1")
        self.node = ServerProcess(
            folder / "n1",
            tls_cert=str(cert),
            tls_key=str(key),
            tls_client_ca=str(authority.file),
            grants=str(self.grants),
            tokens=str(self.tokens),
            token_listen=self.token_address,
            halves=False,
        )
        self._channels: dict[str, grpc.Channel] = {}

    @staticmethod
    def put(path: Path, text: str) -> None:
        """Replaces a file."""
        half = path.with_suffix(".half")
        half.touch(0o600)
        half.write_text(text)
        os.replace(half, path)  # noqa: PTH105 - the same on all systems

    def channel(self, who: str) -> grpc.Channel:
        """The connection of a principal."""
        if who not in self._channels:
            assert self.node.address is not None
            cert, key = self._authority.sign(who, f"{who}.example.org")
            credentials = Tls(self._authority.file, cert, key).credentials()
            self._channels[who] = grpc.secure_channel(
                self.node.address, credentials, options=CHANNEL_OPTIONS
            )
        return self._channels[who]

    def stub(self, who: str) -> rpc.DelayWheelStub:
        """The calls of a principal."""
        return rpc.DelayWheelStub(self.channel(who))

    def close(self) -> None:
        """Ends all of it."""
        for channel in self._channels.values():
            channel.close()
        self.node.kill()


def has_topics(cleaner: FakeCleaner) -> None:
    cleaner.topics = dict.fromkeys(("orders", "bills", "small"), TopicInfo(3, 1_000_000))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    authority = Authority(tmp_path_factory.mktemp("ca"), "good")
    made = Site(tmp_path_factory.mktemp("grants"), authority)
    sent = [message("orders", 1), message("bills", 2)]
    try:
        made.node.start(prepare=has_topics)

        def is_sent() -> bool:
            request = pb.DelayProduceRequest(messages=sent)
            return all(each.handle for each in made.stub("admin").DelayProduce(request).results)

        wait_until("both are accepted", lambda: told(is_sent) == "True", timeout_s=20)
        yield made
    finally:
        made.close()


def told(call: Callable[[], object]) -> str:
    """Returns an answer, or the reason of a refusal."""
    try:
        return str(call())
    except grpc.RpcError as error:
        failed = AttemptFailure.of_call(cast("grpc.Call", error))
        return str(failed.reason or failed.code.name)


def ref(number: int, topic: str) -> pb.MessageRef:
    named = pb.IdAndDue(id=number.to_bytes(16, "big"), due_ms=DUE_MS, topic=topic)
    return pb.MessageRef(id_and_due=named)


ORDERS, BILLS, NOWHERE = ref(1, "orders"), ref(2, "bills"), ref(99, "orders")


def produced(stub: rpc.DelayWheelStub, topics: str) -> str:
    request = pb.DelayProduceRequest(messages=[message(topic, 7) for topic in topics.split()])
    results = stub.DelayProduce(request, timeout=9).results
    return " ".join(result.error.reason or "ok" for result in results)


def streamed(stub: rpc.DelayWheelStub, topic: str) -> str:
    request = pb.DelayProduceRequest(messages=[message(topic, 7)])
    (answer,) = stub.DelayProduceStream(iter([request]), timeout=9)
    return answer.results[0].error.reason or "ok"


def got(stub: rpc.DelayWheelStub, named: pb.MessageRef) -> str:
    found = stub.GetMessage(pb.GetMessageRequest(message=named), timeout=9).message
    return f"{found.topic} {found.key.decode()}{content_of(found)}"


def content_of(found: pb.StoredMessage) -> str:
    """The value, or that it may not be read; without either the answer is an untruth."""
    return "withheld" if found.content_withheld else found.value.decode()


def listed(messages: Iterable[pb.StoredMessage]) -> str:
    return " ".join(sorted({f"{m.topic}:{content_of(m)}" for m in messages}))


def searched(stub: rpc.DelayWheelStub, **wanted: object) -> str:
    request = pb.SearchRequest(filter=pb.Filter(**wanted), with_content=True)  # type: ignore[arg-type]
    return listed(stub.Search(request, timeout=9).messages)


def of_slot(stub: rpc.DelayWheelStub) -> str:
    return listed(stub.GetSlot(pb.GetSlotRequest(slot=SLOT, with_content=True), timeout=9).messages)


def found_to_cancel(stub: rpc.DelayWheelStub, **wanted: object) -> str:
    request = pb.CancelManyRequest(filter=pb.Filter(**wanted), dry_run=True)  # type: ignore[arg-type]
    results = stub.CancelMany(request, timeout=9).results
    return " ".join(sorted({result.topic for result in results}))


def cancelled(stub: rpc.DelayWheelStub, *named: pb.MessageRef) -> str:
    """What becomes of cancels; one that goes on is never decided: the leader commits nothing."""
    asked = pb.CancelRequest(messages=named)
    results = patiently(lambda timeout_s: stub.Cancel(asked, timeout=timeout_s)).results
    outcome = pb.CancelOutcome.Name
    return " ".join(
        each.error.reason or outcome(each.outcome).removeprefix("CANCEL_OUTCOME_")
        for each in results
    )


def moved(stub: rpc.DelayWheelStub, named: pb.MessageRef) -> str:
    wanted = pb.NewDue(message=named, deliver_at_ms=DUE_MS + 5_000)
    asked = pb.RescheduleRequest(messages=[wanted])
    (result,) = patiently(lambda timeout_s: stub.Reschedule(asked, timeout=timeout_s)).results
    return result.error.reason or pb.RescheduleOutcome.Name(result.outcome).removeprefix(
        "RESCHEDULE_OUTCOME_"
    )


def patiently(call: Callable[[float], Answer]) -> Answer:
    """Makes a call that is answered at the end of its time: a busy machine may need more of it."""
    for timeout_s in (1.5, 6.0):
        try:
            return call(timeout_s)
        except grpc.RpcError as error:
            if cast("grpc.Call", error).code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
    return call(30.0)


def described(stub: rpc.DelayWheelStub, *, details: bool) -> str:
    return stub.DescribeCluster(pb.DescribeClusterRequest(details=details), timeout=9).node


WHO = ("admin", "shop", "viewer", "reader", "sender", "ops", "nobody")
F = "FORBIDDEN"
NOT_THERE = "MESSAGE_NOT_FOUND"
ALL = "bills:v orders:v"
GOES_ON = "FORBIDDEN NOT_FOUND CANCEL_UNKNOWN"
BARE = "bills:withheld orders:withheld"
TABLE: dict[str, tuple[Callable[[rpc.DelayWheelStub], str], tuple[str, ...]]] = {
    "DelayProduce": (
        lambda stub: produced(stub, "orders bills"),
        ("ok ok", f"ok {F}", F, F, f"ok {F}", F, F),
    ),
    "DelayProduceStream": (lambda stub: streamed(stub, "bills"), ("ok", F, F, F, F, F, F)),
    "Commit": (
        lambda stub: str(stub.Commit(pb.CommitRequest(), timeout=9)),
        ("HALVES_OFF", "HALVES_OFF", F, F, "HALVES_OFF", F, F),
    ),
    "GetMessage, orders": (
        lambda stub: got(stub, ORDERS),
        ("orders kv", "orders withheld", "orders withheld", "orders kv", F, F, F),
    ),
    "GetMessage, bills": (
        lambda stub: got(stub, BILLS),
        ("bills kv", F, "bills withheld", F, F, F, F),
    ),
    "GetMessage, nowhere": (
        lambda stub: got(stub, NOWHERE),
        (NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE, F, F, F),
    ),
    "Search": (
        lambda stub: searched(stub, from_ms=DUE_MS),
        (ALL, "orders:withheld", BARE, "orders:v", F, F, F),
    ),
    "Search, by key": (
        lambda stub: searched(stub, key=b"k"),
        (ALL, F, F, "orders:v", F, F, F),
    ),
    "Search, bills": (
        lambda stub: searched(stub, topic="bills"),
        ("bills:v", F, "bills:withheld", F, F, F, F),
    ),
    "GetSlot": (of_slot, (ALL, "orders:withheld", BARE, "orders:v", F, F, F)),
    "ListSlots": (
        lambda stub: stub.ListSlots(pb.ListSlotsRequest(), timeout=9).node,
        ("n1", "n1", "n1", "n1", F, F, F),
    ),
    "CancelMany": (
        lambda stub: found_to_cancel(stub, id=(1).to_bytes(16, "big")),
        ("orders", "orders", F, F, "orders", F, F),
    ),
    "CancelMany, bills": (
        lambda stub: found_to_cancel(stub, id=(2).to_bytes(16, "big")),
        ("bills", "", F, F, "", F, F),
    ),
    "CancelMany, by key": (
        lambda stub: found_to_cancel(stub, key=b"k", from_ms=DUE_MS),
        ("bills orders", F, F, F, F, F, F),
    ),
    "Cancel": (
        lambda stub: cancelled(stub, BILLS, NOWHERE, ORDERS),
        ("CANCEL_UNKNOWN NOT_FOUND CANCEL_UNKNOWN", GOES_ON, F, F, GOES_ON, F, F),
    ),
    "Reschedule": (
        lambda stub: moved(stub, BILLS),
        ("RESCHEDULE_UNKNOWN", F, F, F, F, F, F),
    ),
    "DescribeCluster": (lambda stub: described(stub, details=False), ("n1",) * 6 + (F,)),
    "DescribeCluster, details": (
        lambda stub: described(stub, details=True),
        ("n1", "n1", "n1", "n1", F, "n1", F),
    ),
    "WhoAmI": (
        lambda stub: stub.WhoAmI(pb.WhoAmIRequest(), timeout=9).principal,
        tuple(f"dns:{who}.example.org" for who in WHO),
    ),
}


@pytest.mark.parametrize("call", TABLE)
def test_each_call_by_each_principal(site: Site, call: str) -> None:
    make, expected = TABLE[call]
    answers = {who: told(lambda who=who: make(site.stub(who))) for who in WHO}  # type: ignore[misc]
    assert answers == dict(zip(WHO, expected, strict=True))


def test_operators_calls_need_the_right_to_operate(site: Site) -> None:
    def answers(who: str) -> set[str]:
        admin = rpc.DelayWheelAdminStub(site.channel(who))
        return {
            told(lambda: admin.ReplaceNode(pb.ReplaceNodeRequest(node="x", dry_run=True))),
            told(lambda: admin.RemoveNode(pb.RemoveNodeRequest(node="x", dry_run=True))),
            told(lambda: admin.SetBack(pb.SetBackRequest(dry_run=True))),
        }

    for who in WHO:
        may = who in {"admin", "ops"}
        assert answers(who) == ({"NODE_UNKNOWN", "NOTHING_TO_SET_BACK"} if may else {F})


SECURITY = Path(__file__).parents[2] / "docs" / "SECURITY.md"


def shown_ways(site: Site, folder: Path) -> dict[tuple[str, str], tuple[Tls | None, str | None]]:
    """How callers show who they are, by port: their files for TLS, and a token."""
    good, other = site.authority, Authority(folder, "other")
    without = Tls(good.file)
    return {
        ("listen", "nothing, in plain text"): (None, None),
        ("listen", "no certificate"): (without, None),
        ("listen", "a certificate that somebody else has signed"): (
            Tls(good.file, *other.sign("shop", "shop.example.org")),
            None,
        ),
        ("listen", "an expired certificate"): (
            Tls(good.file, *good.sign("late", "shop.example.org", days=-1)),
            None,
        ),
        ("listen", "a certificate that no grant names"): (
            Tls(good.file, *good.sign("unnamed", "unnamed.example.org")),
            None,
        ),
        ("listen", "the certificate of another node"): (
            Tls(good.file, *good.sign("n2", "n2.example.org")),
            None,
        ),
        ("token_listen", "nothing, in plain text"): (None, None),
        ("token_listen", "no token"): (without, None),
        ("token_listen", "a token that nobody has"): (without, "other"),
    }


def test_who_gets_in_is_as_the_table_in_the_docs_says(site: Site, tmp_path: Path) -> None:
    """Each call, the operators' and health included, by each way to show who calls."""
    rows = SECURITY.read_text().partition("### Who gets in")[2].partition("### Quotas")[0]
    table = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in rows.splitlines()
        if line.startswith("| `")
    ]
    ways = shown_ways(site, tmp_path)
    assert [(at, shows) for at, shows, *_ in table] == list(ways)
    service = pb.DESCRIPTOR.services_by_name
    calls = [
        f"/{each.full_name}/{method.name}"
        for name in ("DelayWheel", "DelayWheelAdmin")
        for each in [service[name]]
        for method in each.methods
        if method.name not in {"WhoAmI", "DelayProduceStream"}
    ]
    for at, shows, *told_each in table:
        tls, token = ways[at, shows]
        address = site.token_address if at == "token_listen" else site.node.address or ""
        metadata: Metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        channel = (
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.secure_channel(address, tls.credentials(), options=CHANNEL_OPTIONS)
        )
        with channel:
            call = partial(answered, channel, metadata)
            who, health = call("/delaywheel.v1.DelayWheel/WhoAmI"), call(HEALTH)
            seen = [{call(name) for name in calls}, who, health]
        assert seen == [{told_each[0]}, *told_each[1:]], (at, shows)


HEALTH = "/grpc.health.v1.Health/Check"
Metadata = tuple[tuple[str, str | bytes], ...]


def answered(channel: grpc.Channel, metadata: Metadata, method: str) -> str:
    """What a call without content is told, as the table in the docs has it."""
    call: Callable[..., bytes] = channel.unary_unary(method)

    def ask() -> str:
        answer = call(b"", timeout=9, metadata=metadata)
        if method == HEALTH:
            return "answered"  # whether it serves is another matter
        principal = pb.WhoAmIResponse.FromString(answer).principal
        return "its name" if principal.endswith(".example.org") else principal

    return told(ask)


def test_every_call_is_in_the_table_of_rights() -> None:
    """A new call cannot be forgotten: without a row no node starts to serve it."""
    services = pb.DESCRIPTOR.services_by_name
    methods = [method.name for service in services.values() for method in service.methods]
    assert sorted(methods) == sorted(NEEDS)
    tried = {name.partition(",")[0] for name in TABLE}
    assert tried | {m.name for m in services["DelayWheelAdmin"].methods} == set(NEEDS)


def test_quotas_bound_what_a_principal_sends_and_what_a_topic_holds(site: Site) -> None:
    """Another principal is not hurt; the SDK waits as it is told, and whoami shows the quotas."""
    metered, sent = site.stub("metered"), pb.DelayProduceRequest()
    sent.messages.extend(message("bills", 100 + number) for number in range(6))
    assert refusal(metered, sent) is None, "more at once than is saved up, if anything is"
    # While the machine pauses, what was spent is earned again: it is tried until it is too much.
    failure = wait_until("more is refused", lambda: refusal(metered, sent))
    assert failure.reason == "QUOTA_EXCEEDED"
    assert failure.retry_delay_s is not None
    assert 0 < failure.retry_delay_s <= 1.5
    assert produced(site.stub("shop"), "orders") == "ok"
    cert, key = site.authority.sign("metered", "metered.example.org")
    tls, began_s = Tls(site.authority.file, cert, key), time.monotonic()
    with Client(site.node.address or "", tls=tls, timeout=20) as client:
        for _ in range(8):
            client.produce("bills", b"v", delay="1h")
    assert time.monotonic() - began_s > 0.7, "four a second, four saved up, and the last one"
    with_key = pb.Filter(topic="bills", key=b"of nobody")
    for begin in (
        partial(metered.Cancel.future, pb.CancelRequest(messages=[NOWHERE])),
        partial(metered.CancelMany.future, pb.CancelManyRequest(filter=with_key)),
        partial(metered.CancelMany.future, pb.CancelManyRequest(filter=with_key, dry_run=True)),
    ):
        # At once: one after the other, on a busy machine they may be no more than are allowed.
        at_once = [begin(timeout=9) for _ in range(20)]
        assert "QUOTA_EXCEEDED" in {told(each.result) for each in at_once}

    def count() -> str:
        request = pb.DelayProduceRequest(messages=[message("small", n) for n in range(5)])
        results = site.stub("admin").DelayProduce(request, timeout=9).results
        return " ".join(each.error.reason or "ok" for each in results)

    assert count() == "ok ok ok QUOTA_EXCEEDED QUOTA_EXCEEDED"
    wait_until("the first are counted", lambda: count() == " ".join(["QUOTA_EXCEEDED"] * 5))
    refused = {who: told(partial(refused_for_quotas, site.stub(who))) for who in WHO}
    assert refused == {**dict.fromkeys(WHO, ""), **_WITH_OPERATE, "sender": F, "nobody": F}
    who = metered.WhoAmI(pb.WhoAmIRequest(), timeout=9)
    assert who.quota == pb.Quota(
        messages_per_second=4, questions_per_second=1, in_flight_bytes=1_000_000
    )
    shown = site.stub("sender").WhoAmI(pb.WhoAmIRequest(), timeout=9)
    assert not shown.HasField("quota")
    assert [each.topics for each in who.topic_quotas] == [["small"], ["unseen"]]
    assert not shown.topic_quotas


def test_a_silent_member_has_no_report_once_names_are_withheld() -> None:
    answer = pb.DescribeClusterResponse(members=[pb.Member(node="n2", silent="away")])
    answer.members.add(node="n1").report.quota_refusals.add(principal="token:bob")
    withhold_names(answer)
    assert [member.HasField("report") for member in answer.members] == [False, True]
    assert "bob" not in str(answer)


_WITH_OPERATE = dict.fromkeys(("admin", "ops"), "dns:metered.example.org")


def refused_for_quotas(stub: rpc.DelayWheelStub) -> str:
    """Who was, as the node tells it."""
    asked = pb.DescribeClusterRequest(details=True)
    (member,) = stub.DescribeCluster(asked, timeout=9).members
    return " ".join(each.principal for each in member.report.quota_refusals if each.messages)


def refusal(stub: rpc.DelayWheelStub, sent: pb.DelayProduceRequest) -> AttemptFailure | None:
    """Why messages are refused; None if all are accepted."""
    try:
        assert len(stub.DelayProduce(sent, timeout=9).results) == len(sent.messages)
    except grpc.RpcError as error:
        return AttemptFailure.of_call(cast("grpc.Call", error))
    return None


def test_no_filter_by_a_name_that_no_topic_can_have(site: Site) -> None:
    """Its rights were looked up, kept and quoted whole: gRPC drops so long a status."""
    for look in (searched, found_to_cancel):
        asked = partial(look, site.stub("shop"), topic="x" * 100_000)
        assert told(asked) == "TOPIC_INVALID"


def test_who_lists_services_takes_no_stream_of_a_sender(site: Site) -> None:
    """Reflection is open to whoever reaches a port, and its calls are streams."""
    request, ended = reflection_pb2.ServerReflectionRequest(list_services=""), threading.Event()

    def requests() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        while not ended.wait(0.2):
            yield request

    credentials = Tls(site.authority.file).credentials()
    with ExitStack() as stack:
        streams = []
        for _ in range(16):
            channel = stack.enter_context(
                grpc.secure_channel(site.token_address, credentials, options=CHANNEL_OPTIONS)
            )
            reflect = channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            streams += [reflect(requests()), reflect(requests())]
        stack.callback(ended.set)
        answers = [told(partial(next, stream)) for stream in streams]
        assert any("ServerReflection" in answer for answer in answers)
        assert told(lambda: streamed(site.stub("admin"), "bills")) == "ok"


def test_nobody_passes_for_a_node(site: Site) -> None:
    for shown in ("1", "", "0" * 64):
        metadata = (("dw-passed", shown),)
        request = pb.CancelRequest(messages=[BILLS])
        cancel = site.stub("nobody").Cancel
        assert told(lambda: cancel(request, timeout=9, metadata=metadata)) == "NODE_UNPROVEN"  # noqa: B023
    produce = site.stub("nobody").DelayProduce
    sent = pb.DelayProduceRequest(messages=[message("orders", 7)])
    assert told(lambda: produce(sent, timeout=9, metadata=(("dw-passed", "1"),))) == F


def test_a_certificate_is_known_by_its_first_name_in_order_of_kinds(site: Site) -> None:
    """URI before DNS; a common name is none, whatever it reads like: `principal_from` as it is."""
    uri, dns, common_name = "spiffe://shop.example/eu", "eu.example.org", "eu common"
    for number, (names, principal) in enumerate(
        (
            ({"uri": uri, "dns": dns, "common_name": common_name}, f"uri:{uri}"),
            ({"dns": dns, "common_name": common_name}, f"dns:{dns}"),
            ({"uri": uri}, f"uri:{uri}"),
            ({"common_name": uri}, "anonymous"),
            ({}, "anonymous"),
        )
    ):
        given: dict[str, Any] = names
        files = site.authority.sign_names(f"names-{number}", **given)
        tls = Tls(site.authority.file, *files)
        who = ask(Nodes(site.node.address or "", tls), lambda stub: stub.WhoAmI(pb.WhoAmIRequest()))
        assert (who.principal, who.shown_by) == (
            principal,
            "nothing" if principal == "anonymous" else "certificate",
        )


def test_a_token_says_who_calls(site: Site) -> None:
    """It comes before the certificate; one that is not known is no reason to look at that."""

    def answer(token: str) -> str:
        metadata = (("authorization", f"Bearer {token}"),)
        who = site.stub("admin").WhoAmI
        return told(lambda: who(pb.WhoAmIRequest(), timeout=9, metadata=metadata).principal)

    assert answer("t0ken") == "token:token-shop"
    assert answer("other") == "TOKEN_UNKNOWN"
    assert answer("") == "TOKEN_UNKNOWN"


def test_a_token_is_shown_at_a_port_of_its_own(site: Site, tmp_path: Path) -> None:
    """Where no certificate is asked for; the nodes that are named there are named by that port."""
    file = tmp_path / "token"
    site.put(file, "t0ken\n")
    tls = Tls(site.authority.file, token=file)
    with Client(site.token_address, tls=tls, timeout=60) as client:
        handle = client.produce("orders", b"v", delay="1h")
        with pytest.raises(RefusedError, match="FORBIDDEN"):
            client.produce("bills", b"v", delay="1h")
        assert client.get(handle) is not None
    nodes = Nodes(site.token_address, tls)
    described = ask(nodes, lambda stub: stub.DescribeCluster(pb.DescribeClusterRequest()))
    assert [member.address for member in described.members] == [site.token_address]
    site.put(file, "other\n")
    with (
        Client(site.token_address, tls=Tls(site.authority.file, token=file), timeout=60) as client,
        pytest.raises(RefusedError, match="TOKEN_UNKNOWN"),
    ):
        client.produce("orders", b"v", delay="1h")
    nobody = Nodes(site.token_address, Tls(site.authority.file))
    who = ask(nobody, lambda stub: stub.WhoAmI(pb.WhoAmIRequest()))
    assert (who.principal, who.shown_by, list(who.grants)) == ("anonymous", "nothing", [])


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [("t", 0o604, "everybody may read it"), ("", 0o600, "one token"), ("a b", 0o600, "one token")],
)
def test_a_token_that_others_may_read_is_not_shown(
    tmp_path: Path, content: str, mode: int, told: str
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(ValueError, match=told):
        Tls(token=file)


def test_grants_and_tokens_that_change_count_at_once(site: Site) -> None:
    """Also on a stream that is open; a file that is not in order changes nothing."""
    site.put(site.tokens, f'{sha256(b"late").hexdigest()} = "late"\n')
    site.put(site.grants, GRANTS + '[[grant]]\nwho = ["token:late"]\nmay = ["produce"]\n')
    metadata = (("authorization", "Bearer late"),)
    sending = True

    def requests() -> Iterator[pb.DelayProduceRequest]:
        while sending:
            yield pb.DelayProduceRequest(messages=[message("orders", 7)])
            time.sleep(0.02)

    def opens() -> bool:
        request = pb.DelayProduceRequest(messages=[message("orders", 7)])
        answer = site.stub("nobody").DelayProduce(request, timeout=9, metadata=metadata)
        return bool(answer.results[0].handle)

    wait_until("the token is taken", lambda: told(opens) == "True")
    site.put(site.grants, "[[grant]]\nwho = 1\n")
    time.sleep(1.1)  # so often files are looked at
    stub = site.stub("nobody")
    answers = stub.DelayProduceStream(requests(), timeout=30, metadata=metadata)
    try:
        assert next(answers).results[0].handle
        site.put(site.grants, GRANTS)
        began_s = time.monotonic()
        refused = next(each for each in answers if each.results[0].error.reason)
        assert refused.results[0].error.reason == F
        assert time.monotonic() - began_s < 10
        site.put(site.tokens, f'{sha256(b"t0ken").hexdigest()} = "token-shop"\n')
        gone = next(each for each in answers if each.error.reason)
        assert gone.error.reason == "TOKEN_UNKNOWN"
    finally:
        sending = False
        answers.cancel()
