"""gRPC calls as bytes: admitted, read, dispatched, and their answers counted.

gRPC would read a request, and decode it, before anything could refuse it. So every call is treated
as a stream of bytes, from which one message is read when there is room for it; on the wire the two
are the same. Answers leave as bytes, which are counted until gRPC has passed them on. Writes to a
stream report that; for a unary call's answer, nothing reports that its caller went away before.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from delaywheel.reasons import Reason
from delaywheel_replica.server.access.audit import OF_ACCESS, Audit
from delaywheel_replica.server.access.callers import (
    ANYBODY,
    Access,
    CallContext,
    Caller,
    CallOrigin,
)
from delaywheel_replica.server.intake.admission import Admission
from delaywheel_replica.server.intake.reception import OpenStream, Reception
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.refusals import (
    Context,
    Refusal,
    RequestRefusedError,
    abort,
    refusal_of,
)

# Queries name a second, or up to 1,000 messages: no such request is longer.
_QUESTION_BYTES: Final = 1 << 17

GrpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Answer(NamedTuple):
    """An answer, and the function to call once gRPC has passed it on."""

    content: bytes
    end: Callable[[], None]


Work: TypeAlias = Callable[[bytes, CallContext], Awaitable[Answer]]
"""Answers a call, or raises the refusal."""


class StreamContext:
    """The context of a call that stays open, which notes what passes.

    Attributes:
        caller: Who makes it.
    """

    def __init__(self, context: Context, stream: OpenStream, caller: Caller = ANYBODY) -> None:
        self.caller = caller
        self._context = context
        self._stream = stream

    @property
    def origin(self) -> CallOrigin:
        """Where it comes from."""
        return self._stream.caller

    async def read(self) -> object:
        """Reads a request, as bytes; anything else: the caller has sent its last one."""
        content = await self._context.read()
        if isinstance(content, bytes):
            self._stream.received()
        return content

    async def write(self, content: bytes) -> None:
        """Writes an answer."""
        await self._context.write(content)
        self._stream.answered()


StreamWork: TypeAlias = Callable[[StreamContext], Awaitable[None]]
"""Reads and answers a stream until it ends."""


class AnswerBounds(NamedTuple):
    """Bounds on answers to questions, separate from what producers have in flight.

    Attributes:
        admission: Counts them.
        length_bytes: The greatest length of the answer to a request.
    """

    admission: Admission
    length_bytes: Callable[[Message], int]


def _nothing(_address: str, _expires_s: float) -> None:
    """Does nothing: nobody wants to know."""


class GrpcHandlers:
    """Makes gRPC handlers. For the event loop's thread."""

    def __init__(
        self,
        reception: Reception,
        counts: NodeCounts,
        answers: AnswerBounds,
        access: Access | None = None,
        audit: Audit | None = None,
        on_admitted: Callable[[str, float], None] = _nothing,
    ) -> None:
        """Makes none yet.

        Args:
            reception: Bounds what is received.
            counts: Counts refused calls.
            answers: Bounds answers.
            access: Says who may make which call; None: gRPC's own services, which everybody may
                use, and which know gRPC's contexts alone.
            audit: Notes what they change, and who may not.
            on_admitted: Called with the connection of each call whose caller may do something, and
                with when its certificate expires.
        """
        self._reception = reception
        self._counts = counts
        self._answers = answers
        self._access = access
        self._audit = audit or Audit()
        self._on_admitted = on_admitted

    def of_service(
        self,
        service: ServiceDescriptor,
        servicer: object,
        raw: Mapping[str, GrpcHandler],
    ) -> dict[str, GrpcHandler]:
        """Returns handlers for all calls of a service, by method.

        Register them by method (`add_registered_method_handlers`): gRPC accepts one call of each
        registered method at a time, and one of all others together, and takes some six passes of
        the event loop for each. So calls of one method do not queue behind those of another.

        Args:
            service: The service's descriptor.
            servicer: Has a method for each call, as gRPC's generated classes have.
            raw: Handlers of those calls that accept bytes.
        """
        return {
            method.name: raw.get(method.name) or self._handler(method, servicer)
            for method in service.methods
        }

    def call(self, name: str, work: Work) -> GrpcHandler:
        """Returns a handler with one request and one answer, both as bytes."""

        async def answer(held: ExitStack, context: Context, call: CallContext) -> None:
            ready = await work(await self._received(context, call.origin), call)
            held.callback(ready.end)
            await context.write(ready.content)

        return self._guarded(name, answer)

    def stream(self, name: str, work: StreamWork) -> GrpcHandler:
        """Returns a handler for a stream of any number of requests and answers."""

        async def answer(held: ExitStack, context: Context, call: CallContext) -> None:
            loop = asyncio.get_running_loop()
            stream = self._begun_stream(held, call.origin)
            limit = asyncio.timeout(None)
            try:
                async with limit:
                    stream.on_ended = lambda: limit.reschedule(loop.time())
                    await work(StreamContext(context, stream, call.caller))
            except TimeoutError:
                if not stream.is_ended:
                    raise
                raise RequestRefusedError(
                    Reason.BACKPRESSURE,
                    "Nothing was sent on this stream, and another was opened in its place;"
                    " open it again when there is something to send",
                ) from None

        return self._guarded(name, answer)

    def _admitted(self, name: str, context: Context) -> CallContext:
        access, address = self._access, context.peer()
        caller = ANYBODY if access is None else access.admit(name, context)
        if access is not None and not caller.rights.are_none:
            self._on_admitted(address, caller.expires_s)
        return CallContext(caller, address, context.time_remaining(), context)

    def _begun_stream(self, held: ExitStack, origin: CallOrigin) -> OpenStream:
        stream = self._reception.begin_stream(origin, asyncio.get_running_loop().time)
        held.callback(self._reception.end_stream, stream)
        return stream

    def _guarded(
        self, name: str, answer: Callable[[ExitStack, Context, CallContext], Awaitable[None]]
    ) -> GrpcHandler:
        """Returns a handler that counts the call and ends it with an answer or a reason.

        gRPC would log any exception with everything it knows about it: nothing that a caller does
        may cause that.
        """

        async def handle(_: object, context: Context) -> None:
            try:
                with ExitStack() as held:
                    try:
                        call = self._admitted(name, context)
                        held.callback(self._reception.begin_call(call.origin))
                        await answer(held, context, call)
                    except (grpc.aio.AbortError, grpc.aio.InternalError):
                        raise
                    except Exception as error:  # noqa: BLE001 - a defect of ours is named, too
                        refusal = refusal_of(error)
                    else:
                        return
                if refusal.reason in OF_ACCESS:
                    self._audit.refused(name, context.peer(), refusal)
                self._counts.refused_calls[name, refusal.reason] += 1
                try:
                    await abort(context, refusal)
                finally:
                    if refusal.reason is Reason.CERTIFICATE_EXPIRED:
                        self._on_admitted(context.peer(), -inf)
            except grpc.aio.InternalError:  # the caller is gone: nothing can be sent to it
                raise asyncio.CancelledError from None

        return grpc.stream_stream_rpc_method_handler(handle)

    def _handler(self, method: MethodDescriptor, servicer: object) -> GrpcHandler:
        answer = getattr(servicer, method.name)
        request_class: type[Message] = GetMessageClass(method.input_type)
        if method.client_streaming:
            return self.stream(method.name, _conversation(request_class, answer))
        if method.server_streaming:  # gRPC's own Watch, which writes to its context
            return self._watch(method.name, request_class, answer)
        return self.call(method.name, self._question(method.name, request_class, answer))

    def _question(
        self,
        name: str,
        request_class: type[Message],
        answer: Callable[[Any, Any], Awaitable[Message]],
    ) -> Work:
        admission, length_bytes = self._answers

        async def work(content: bytes, call: CallContext) -> Answer:
            request = _parsed(request_class, content)
            origin = call.origin
            with admission.admit(origin, length_bytes(request)):
                encoded = (await self._answered(name, answer, request, call)).SerializeToString()
                return Answer(encoded, admission.hold_answer(origin, len(encoded)))

        return work

    async def _answered(
        self,
        name: str,
        answer: Callable[[Any, Any], Awaitable[Message]],
        request: Message,
        call: CallContext,
    ) -> Message:
        if self._access is None:
            return await answer(request, call.shown)
        # If its caller leaves, nobody is told what becomes of it, which may be all of it.
        ended: Message | Refusal | None = None
        try:
            ended = answered = await answer(request, call)
        except RequestRefusedError as error:
            ended = error.refusal
            raise
        finally:
            self._audit.ended(name, call, request, ended)
        return answered

    def _watch(
        self,
        name: str,
        request_class: type[Message],
        watch: Callable[[Any, "_Encoding"], Awaitable[None]],
    ) -> GrpcHandler:
        async def answer(held: ExitStack, context: Context, call: CallContext) -> None:
            self._begun_stream(held, call.origin).received()  # and it is never answered for good
            content = await self._received(context, call.origin)
            await watch(_parsed(request_class, content), _Encoding(context))

        return self._guarded(name, answer)

    async def _received(self, context: Context, origin: CallOrigin) -> bytes:
        content = await self._reception.receive(origin, context.read)
        if not isinstance(content, bytes):
            raise RequestRefusedError(Reason.REQUEST_MALFORMED, "No request")
        return content


class _Encoding:
    """A context that encodes messages before they are written."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def write(self, message: Message) -> None:
        await self._context.write(message.SerializeToString())


def _conversation(
    request_class: type[Message],
    answers: Callable[[AsyncIterator[Any], StreamContext], AsyncIterator[Message]],
) -> StreamWork:
    async def requests(context: StreamContext) -> AsyncIterator[Message]:
        while isinstance(content := await context.read(), bytes):
            yield _parsed(request_class, content)

    async def work(context: StreamContext) -> None:
        async for answer in answers(requests(context), context):
            await context.write(answer.SerializeToString())

    return work


def _parsed(request_class: type[Message], content: bytes) -> Message:
    if len(content) > _QUESTION_BYTES:
        raise RequestRefusedError(
            Reason.REQUEST_TOO_LARGE, f"{len(content):,} bytes, at most {_QUESTION_BYTES:,}"
        )
    try:
        return request_class.FromString(content)
    except DecodeError as error:
        name = request_class.DESCRIPTOR.name
        raise RequestRefusedError(Reason.REQUEST_MALFORMED, f"It is not a valid {name}") from error
