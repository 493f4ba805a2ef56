"""The gRPC servers: limits, keepalive, health, reflection, and the ports.

Each port has a server of its own: gRPC's core keeps the calls of a method that have come to a
server in one line, so behind a flood of checks at `token_listen`, where anybody gets in, a probe
with a certificate would wait. So it would behind checks there that send nothing, or that nobody
reads the answers of: what health checks take is counted by port, too.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from delaywheel.client.transport.wakeups import reading_all_wakeups
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.config import Config
from delaywheel_replica.peers.sockets import listen, why_not
from delaywheel_replica.server.accepting import accepting_several_calls
from delaywheel_replica.server.access.audit import Audit
from delaywheel_replica.server.access.callers import Access
from delaywheel_replica.server.certificates import MAX_CONNECTION_AGE_MS, NodeCertificates
from delaywheel_replica.server.cluster.operator import Operator
from delaywheel_replica.server.connections import CallerConnections, close_connections
from delaywheel_replica.server.intake.admission import Admission
from delaywheel_replica.server.intake.calls import AnswerBounds, GrpcHandlers
from delaywheel_replica.server.intake.producing import Producing
from delaywheel_replica.server.intake.reception import CALLS, HEALTH, REFLECTION, Reception
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.service import DelayWheelService

_SERVICES: Final = pb.DESCRIPTOR.services_by_name
_HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION: Final = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
# Newer clients ask for v1 first: it is v1alpha, byte for byte, under another name. The library only
# has v1alpha.
REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"
ADMIN_SERVICE = _SERVICES["DelayWheelAdmin"].full_name
SERVICE = _SERVICES["DelayWheel"].full_name
_OPEN_TO_ALL: Final = (health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION_V1)

# Bounds of answers being made, or not yet read: of all callers, of one.
_ANSWERS_BYTES: Final = 64 << 20
_CALLER_ANSWERS_BYTES: Final = 16 << 20
_HEALTH_BYTES: Final = 1 << 20
_HEALTH_ANSWER_BYTES: Final = 64
# At most this many windows of 64 KiB hold calls of one connection that are not read yet.
_CALLS_OF_CALLER: Final = 256
# Calls that have come and are not begun, twice what may be open: those beyond are refused by us.
_PENDING_CALLS: Final = 2 * (CALLS.calls + HEALTH.calls + REFLECTION.calls)
# How long calls on a connection that has its greatest age may go on: streams end with it.
_AGE_GRACE_MS: Final = 60_000
_HANDSHAKE_MS: Final = 10_000
_UNBEGUN_S: Final = 600
# A request above the limit is refused with a reason, unless it is even larger than this.
_TOO_LARGE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Services:
    """The handlers of all services."""

    producing: Producing
    questions: DelayWheelService
    admin: Operator


class ListenError(Exception):
    """The address cannot be listened on."""


class GrpcListener:
    """Listens for calls."""

    def __init__(
        self,
        config: Config,
        services: Services,
        counts: NodeCounts,
        *,
        connections: int,
        access: Access,
        audit: Audit,
        certificates: NodeCertificates | None = None,
    ) -> None:
        """Prepares for so many connections of callers at each port.

        Without certificates they speak plain text.
        """
        self._config = config
        self._certificates = certificates
        self._connections = CallerConnections(connections)
        accepting = accepting_several_calls(self._connections.takes, _OPEN_TO_ALL)
        with reading_all_wakeups(), accepting as self._accepting:
            options = _options(config, connections)
            ports = 1 if config.token_listen is None else 2
            self._servers = [grpc.aio.server(options=options) for _ in range(ports)]
        self._health = health.aio.HealthServicer()
        asked = Admission(
            max_bytes=_ANSWERS_BYTES,
            max_caller_bytes=_CALLER_ANSWERS_BYTES,
            close=close_connections,
        )
        answers = AnswerBounds(asked, services.questions.length_bytes)
        calls = GrpcHandlers(
            Reception(), counts, answers, access, audit, self._connections.admitted
        )
        producing = {
            "DelayProduce": calls.call("DelayProduce", services.producing.one),
            "DelayProduceStream": calls.stream("DelayProduceStream", services.producing.stream),
        }
        _describe_reflection_v1()
        names = (
            *(SERVICE, ADMIN_SERVICE, health.SERVICE_NAME),
            *(reflection.SERVICE_NAME, REFLECTION_V1),
        )
        reflected = reflection.aio.ReflectionServicer(service_names=names)
        reflecting = GrpcHandlers(Reception(REFLECTION), counts, answers).of_service(
            _REFLECTION, reflected, {}
        )
        for name, handlers in (
            (SERVICE, calls.of_service(_SERVICES["DelayWheel"], services.questions, producing)),
            (ADMIN_SERVICE, calls.of_service(_SERVICES["DelayWheelAdmin"], services.admin, {})),
            (reflection.SERVICE_NAME, reflecting),
            (REFLECTION_V1, reflecting),
        ):
            for server in self._servers:
                server.add_registered_method_handlers(name, handlers)
        for server in self._servers:
            checked = Admission(max_bytes=_HEALTH_BYTES, max_caller_bytes=_HEALTH_BYTES)
            checks = GrpcHandlers(
                Reception(HEALTH), counts, AnswerBounds(checked, lambda _: _HEALTH_ANSWER_BYTES)
            ).of_service(_HEALTH, self._health, {})
            server.add_registered_method_handlers(health.SERVICE_NAME, checks)

    async def start(self, earlier_address: str | None) -> str:
        """Listens; returns the address: with port 0 the one before a restart, if it is free."""
        host, _, port = self._config.listen.rpartition(":")
        bound = 0
        if port == "0" and earlier_address is not None:
            with suppress(ListenError):  # another process has taken it
                bound = self._bind("listen", f"{host}:{earlier_address.rpartition(':')[2]}")
        bound = bound or self._bind("listen", self._config.listen)
        if self._config.token_listen is not None:
            self._bind("token_listen", self._config.token_listen)
        for server in self._servers:
            await server.start()
        self._connections.start(self._ports(bound), lambda: self._accepting.is_behind)
        return f"{host}:{bound}"

    async def set_health(self, *, serving: bool) -> None:
        """Sets the health status: whether calls should be sent here."""
        status = health_pb2.HealthCheckResponse
        state = status.SERVING if serving else status.NOT_SERVING
        await self._health.set("", state)
        await self._health.set(SERVICE, state)

    async def until_ended(self) -> None:
        """Waits until no more calls are accepted, because of `stop` or without."""
        await self._accepting.has_ended.wait()

    async def stop(self, grace_s: float) -> None:
        """Stops all calls, by force once the grace period is over."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        self._connections.stop()

    def _ports(self, bound: int) -> dict[int, bool]:
        """Returns the ports for callers, and whether each asks for certificates."""
        ports = {bound: self._config.tls_client_ca is not None}
        if self._config.token_listen is not None:
            ports[int(self._config.token_listen.rpartition(":")[2])] = False
        return ports

    def _bind(self, setting: str, address: str) -> int:
        """Has the server for a setting's port listen; returns the port."""
        takes_tokens = setting == "token_listen"
        assert self._certificates is not None or not takes_tokens
        server = self._servers[takes_tokens]
        try:
            if self._certificates is None:
                return server.add_insecure_port(address)
            credentials = self._certificates.server_credentials(asks=not takes_tokens)
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ListenError(f"{setting} {address}: {_why_not(address) or error}") from error


def _why_not(address: str) -> str | None:
    """Returns the system's reason for not listening at an address, which gRPC keeps to itself."""
    try:
        listen(address).close()
    except OSError as error:
        return why_not(error)
    return None


def _describe_reflection_v1() -> None:
    """Registers the reflection service under its own name, for clients that list services."""
    older = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(older)
    newer = json_format.MessageToJson(older).replace("v1alpha", "v1")
    described = json_format.Parse(newer, descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(described.SerializeToString())


def _options(config: Config, connections: int) -> list[tuple[str, int]]:
    ages = []
    if config.tls_client_ca is not None:  # ends the connections of callers who were revoked
        ages = [
            ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS),
            ("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS),
        ]
    return [
        *ages,
        ("grpc.max_receive_message_length", config.max_request_bytes + _TOO_LARGE_BYTES),
        ("grpc.max_send_message_length", -1),
        # Nothing is inflated: what is sent has the length that is bounded.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Otherwise a server left behind would share the port with its successor.
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        # Keeps what was sent but not yet read on the caller's side, except for one window.
        # Otherwise the window would grow to what the line can carry.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", _CALLS_OF_CALLER),
        # Once a thousand calls have come and are not begun, gRPC would end some as CANCELLED: our
        # own bounds refuse calls by name.
        ("grpc.server.max_pending_requests", _PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS),
        # Nor after half a minute: a call is ours to answer until its caller gives up.
        ("grpc.server_max_unrequested_time_in_server", _UNBEGUN_S),
        # A connection counts from its first byte: one that never speaks TLS has this long.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # Each needs a descriptor, and the wheel needs descriptors more.
        ("grpc.max_allowed_incoming_connections", connections),
        # Detects callers that vanished; callers' own pings are allowed.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
