"""Calls to a running node for the commands that read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import grpc

from delaywheel.client.channel import CHANNEL_OPTIONS, parse_addresses
from delaywheel.client.retry import Failure as FailedAttempt
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub
from delaywheel_replica.cli.failures import ExitCode, Failure

Answer = TypeVar("Answer")


def ask(server: str, call: Callable[[DelayWheelStub], Answer]) -> Answer:
    """Makes a call to the first of these nodes that can answer it; it may be made more than once.

    Args:
        server: Addresses, with commas between.
        call: Makes the call; it sets its own deadline.

    Raises:
        Failure: No node answered, or one refused.
    """
    try:
        addresses = parse_addresses(server)
    except ValueError as error:
        raise Failure("ADDRESS_INVALID", str(error), ExitCode.USAGE) from error
    for address in addresses:
        try:
            with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                return call(DelayWheelStub(channel))
        except grpc.RpcError as error:
            attempt = FailedAttempt.of_call(cast("grpc.Call", error))  # it is both
            if not attempt.verdict.retry:
                break
    raise Failure(
        str(attempt.reason or attempt.code.name),
        f"{attempt.text} ({address})",
        ExitCode.UNAVAILABLE if attempt.verdict.retry else ExitCode.REFUSED,
    )
