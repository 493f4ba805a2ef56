"""The gRPC server: limits, keepalive, health, reflection, and the port."""

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.config import Config
from delaywheel_replica.server.operator import DelayWheelAdminService
from delaywheel_replica.server.service import DelayWheelService

ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["DelayWheelAdmin"].full_name
SERVICE = pb.DESCRIPTOR.services_by_name["DelayWheel"].full_name


class ListenError(Exception):
    """The address cannot be listened on."""


class Listener:
    """Takes calls."""

    def __init__(
        self, config: Config, service: DelayWheelService, admin: DelayWheelAdminService
    ) -> None:
        self._config = config
        self._server = grpc.aio.server(options=_options(config))
        self._health = health.aio.HealthServicer()
        rpc.add_DelayWheelServicer_to_server(service, self._server)
        rpc.add_DelayWheelAdminServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, earlier_address: str | None) -> str:
        """Listens; returns the address.

        Args:
            earlier_address: where this node listened before a restart. Callers know it: with
                port 0 it is tried first.
        """
        host, _, port = self._config.listen.rpartition(":")
        bound = 0
        if port == "0" and earlier_address is not None:
            bound = self._try_port(f"{host}:{earlier_address.rpartition(':')[2]}")
        if not bound:
            bound = self._listen()
        await self._server.start()
        return f"{host}:{bound}"

    async def tell_health(self, *, serving: bool) -> None:
        """Whether calls should be sent here."""
        status = health_pb2.HealthCheckResponse
        state = status.SERVING if serving else status.NOT_SERVING
        await self._health.set("", state)
        await self._health.set(SERVICE, state)

    async def stop(self, grace_s: float) -> None:
        """Ends all calls, the last ones by force."""
        await self._server.stop(grace_s)

    def _listen(self) -> int:
        try:
            return self._server.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise ListenError(f"listen {self._config.listen}: {error}") from error

    def _try_port(self, address: str) -> int:
        try:
            return self._server.add_insecure_port(address)
        except RuntimeError:  # somebody else has it by now
            return 0


def _options(config: Config) -> list[tuple[str, int]]:
    return [
        # Above what is accepted: a request that is too large is refused by name, not by gRPC.
        ("grpc.max_receive_message_length", 2 * config.max_request_bytes + (1 << 20)),
        ("grpc.max_send_message_length", -1),
        # Or a server that was left behind would share the port with its successor.
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        # Of one connection: what is received before it can be counted is bounded, too.
        ("grpc.max_concurrent_streams", 1_024),
        # A caller that is gone without a word is noticed; pings of callers are welcome.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
