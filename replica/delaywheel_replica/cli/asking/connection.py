"""Calls to a running node, for commands that read and for those of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import grpc

from delaywheel.client.exchange.channel import Security, open_channel
from delaywheel.client.exchange.retry import AttemptFailure as FailedAttempt
from delaywheel.identity import parse_addresses
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelAdminStub, DelayWheelStub
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.reaching import Nodes

AnswerT = TypeVar("AnswerT")


def ask(server: Nodes, call: Callable[[DelayWheelStub], AnswerT]) -> AnswerT:
    """Calls the first of these nodes that can answer; the call may be made more than once.

    `call` sets its own deadline.

    Raises:
        CommandFailure: No node answered, or one refused.
    """
    return _ask(server, lambda channel: call(DelayWheelStub(channel)), changes=False)


def described(server: Nodes, timeout_s: float) -> pb.DescribeClusterResponse:
    """Returns the description of a cluster by all its members; raises as `ask` does."""
    request = pb.DescribeClusterRequest(all_members=True)
    return ask(server, lambda stub: stub.DescribeCluster(request, timeout=timeout_s))


def ask_admin(
    server: Nodes, call: Callable[[DelayWheelAdminStub], AnswerT], *, changes: bool
) -> AnswerT:
    """Does the same for operator calls.

    If the call `changes` something, a node without an answer may have done it.
    """
    return _ask(server, lambda channel: call(DelayWheelAdminStub(channel)), changes=changes)


def _ask(server: Nodes, call: Callable[[grpc.Channel], AnswerT], *, changes: bool) -> AnswerT:
    try:
        addresses = parse_addresses(server.addresses)
    except ValueError as error:
        raise CommandFailure("ADDRESS_INVALID", str(error), ExitCode.USAGE) from error
    in_doubt = False
    security = Security(server.tls)
    for address in addresses:
        try:
            with open_channel(address, security.credentials()) as channel:
                return call(channel)
        except grpc.RpcError as error:
            attempt = FailedAttempt.of_call(cast("grpc.Call", error))  # it is a Call, too
            if security.may_explain(attempt):
                attempt = security.explained(address, attempt)
            in_doubt |= changes and not attempt.verdict.outcome_known
            if not attempt.verdict.retry:
                break
    raise CommandFailure(
        str(attempt.reason or attempt.code.name),
        f"{attempt.cause} ({address})",
        _exit_code(attempt, in_doubt=in_doubt),
    )


def _exit_code(attempt: FailedAttempt, *, in_doubt: bool) -> ExitCode:
    if in_doubt:
        return ExitCode.UNKNOWN_OUTCOME
    return ExitCode.UNAVAILABLE if attempt.verdict.retry else ExitCode.REFUSED
