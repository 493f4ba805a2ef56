"""Messages between a node's server and cleaner, beside the two status rows.

State lies in the rows (``server.row``, ``cleaner.row``); the link carries wake-ups and a few
requests, as JSON messages through one inherited pair of ``SOCK_SEQPACKET`` sockets. Nothing here
is promised to arrive: a full buffer drops what is sent (see ``Link.send``), and a restarted
process has missed earlier messages. So every request may be repeated, and every answer names what
it answers.

=================  ==================  ==========================================================
message            direction           meaning
=================  ==================  ==========================================================
``Wake``           both                my row changed
``CommitSoon``     server to cleaner   a cancel was written: commit without waiting for the timer
``AskTopic``       server to cleaner   is this topic there? answer with ``Topics``, asked of Kafka
                                       after this message
``NodeStorage``    server to cleaner   the operator replaced a node or took it out; repeated until
                                       the cleaner's row shows that it is committed
``SetBack``        server to cleaner   the operator wishes w to be set back to the clock; repeated
                                       in the same way
``Reschedule-``    server to cleaner   a message shall have another due; repeated until the
``Proposal``                           cleaner's row shows that it is decided
``Reschedule-``    server to cleaner   what was decided so is in frames; repeated until the
``Written``                            cleaner's row no longer shows it
``Stop-``          server to cleaner   finish the transaction, commit the close of the wheel if
``Requested``                          you lead, exit with 0
``Topics``         cleaner to server   what Kafka said of some topics
``DeadLettered``   cleaner to server   messages that were committed as dead letters
``AskPlace``       server to cleaner   where in Kafka is this message's record? answered with
                                       ``PlaceFound`` after some seconds, or never
``PlaceFound``     cleaner to server   where a record is, or that it was not found
``Handover-``      cleaner to server   here is the other end of a socket, on which records of
``Begins``                             ingress topics are handed over for one term (handover/)
=================  ==================  ==========================================================
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Final, NamedTuple, TypeAlias, get_args

from delaywheel_replica.core.protocol.codec import MalformedError, Text, from_json, to_json
from delaywheel_replica.core.protocol.reschedules import RescheduleProposal, RescheduleWritten
from delaywheel_replica.process.inheritance import LINK_FD_VARIABLE
from delaywheel_replica.process.logs import get_logger

_MESSAGE_LENGTH_BYTES = 64 * 1024
"""No message is longer. The kernel's default bound on one datagram is 208 KiB."""
_TOPICS_LENGTH_BYTES = 16 * 1024
"""The length of a message with many topics, roughly: a nearly full buffer still accepts one."""
_TOPIC_LENGTH_BYTES = 32
"""What an entry takes besides its name, at most."""

log = get_logger(__name__)

_Id: TypeAlias = Annotated[bytes, Text(bytes.hex, bytes.fromhex)]


@dataclass(frozen=True, slots=True)
class Wake:
    """The sender's row has changed."""


@dataclass(frozen=True, slots=True)
class CommitSoon:
    """Requests a commit soon."""


@dataclass(frozen=True, slots=True)
class AskTopic:
    """Asks whether Kafka has a topic, immediately."""

    name: str


@dataclass(frozen=True, slots=True)
class NodeStorage:
    """Registers an operator's choice of a node's storage; `REMOVED`: the node is removed."""

    node: str
    storage: str


@dataclass(frozen=True, slots=True)
class SetBack:
    """Requests that w be set back to the clock, as an operator wishes."""

    set_backs: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The node is stopping cleanly."""


class TopicInfo(NamedTuple):
    """What the server needs to know of a topic.

    ``max_message_bytes`` is None if Kafka does not report it.
    """

    partitions: int
    max_message_bytes: int | None


@dataclass(frozen=True, slots=True)
class Topics:
    """Kafka's answers about some topics. Each message is complete in itself.

    Attributes:
        absent: Names asked for that Kafka, answering without an error, does not have.
        checked_at_ms: ``time.monotonic`` in ms, taken before Kafka was asked. The monotonic clock
            is the machine's, shared by both processes.
    """

    topics: Mapping[str, TopicInfo]
    checked_at_ms: int
    absent: tuple[str, ...] = ()


class DeadLetter(NamedTuple):
    """One message, and why it became a dead letter."""

    id: _Id
    due_ms: int
    topic: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """Messages that were committed as dead letters, in the order in which they were written.

    Attributes:
        cleaner_ms: When the cleaner started, as its row says.
        before: How many it had counted before, since then. If fewer were reported, some were
            dropped on the way.
    """

    cleaner_ms: int
    before: int
    letters: tuple[DeadLetter, ...]


@dataclass(frozen=True, slots=True)
class AskPlace:
    """Asks where the record of a finished message is, whose timestamp its caller may have set.

    Attributes:
        is_dead: Whether it is a dead letter; None: unknown.
        is_named_by_cancel: It may have been cancelled instead: look among the outcomes too.
        is_asked_half: Its group is asked, or was: look for the answer too.
        early_ms: How long before its due it may have been done: a half message is at its commit.
        sharer: Whose turn it is: a number that tells principals apart; 0: nobody has a name.
    """

    question: int
    id: _Id
    due_ms: int
    topic: str
    timestamp_ms: int | None = None
    is_dead: bool | None = None
    is_named_by_cancel: bool = False
    is_asked_half: bool = False
    early_ms: int = 0
    sharer: int = 0


class LinkPlace(NamedTuple):
    """One record in Kafka."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlaceFound:
    """The answer to `AskPlace`.

    Attributes:
        place: None: the record was not found, which proves nothing.
        outcome: What its outcome says, if the place is that of one: it was cancelled, or got
            another due (cancelled); of a half also asked, or committed for its own due.
        answer: What the group of a half has answered, a `HalfAnswer`; None: nothing shows that.
    """

    question: int
    place: LinkPlace | None = None
    dead_reason: str | None = None
    outcome: str | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class HandoverBegins:
    """Begins a hand-over of ingress records, which ends with its socket.

    Attributes:
        fd: The server's end of the socket, which goes beside the message. The sender keeps its
            descriptor, and may close it; the receiver gets one of its own, and has to close it.
    """

    format: int
    fd: int = field(default=-1, compare=False)


LETTERS_AT_MOST = 200
"""The most letters in one message: some 16 KiB."""

LinkMessage: TypeAlias = (
    Wake
    | CommitSoon
    | AskTopic
    | NodeStorage
    | SetBack
    | RescheduleProposal
    | RescheduleWritten
    | StopRequested
    | Topics
    | DeadLettered
    | AskPlace
    | PlaceFound
    | HandoverBegins
)
_KINDS: Final = {kind.__name__: kind for kind in get_args(LinkMessage)}


def split_topics(message: Topics) -> Iterator[Topics]:
    """Splits a message into parts that are each small enough for the socket.

    A name too long for any message is left out: Kafka cannot have such a topic.
    """
    there = dict[str, TopicInfo]()
    absent = list[str]()
    length_bytes = 0
    for name, info in chain(message.topics.items(), ((name, None) for name in message.absent)):
        entry_bytes = len(json.dumps(name)) + _TOPIC_LENGTH_BYTES
        if entry_bytes > _TOPICS_LENGTH_BYTES:
            continue
        if length_bytes and length_bytes + entry_bytes > _TOPICS_LENGTH_BYTES:
            yield Topics(there, message.checked_at_ms, tuple(absent))
            there, absent, length_bytes = {}, [], 0
        length_bytes += entry_bytes
        if info is None:
            absent.append(name)
        else:
            there[name] = info
    if length_bytes:
        yield Topics(there, message.checked_at_ms, tuple(absent))


class Link:
    """One end of the link. Non-blocking.

    ``send`` is for any thread, since the kernel takes a datagram whole; ``receive`` and ``close``
    are for one. ``fileno`` is for ``loop.add_reader``, ``select`` or ``poll``.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(0)

    @classmethod
    def inherited(cls) -> "Link":
        """Returns the end that the supervisor gave this process."""
        return cls(int(os.environ[LINK_FD_VARIABLE]))

    def fileno(self) -> int:
        """Returns the descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: LinkMessage) -> bool:
        """Sends a message, or drops it if it is too long or the buffer is full.

        Returns False also when the other end is gone for good.
        """
        content = encode(message)
        if len(content) > _MESSAGE_LENGTH_BYTES:
            log.error("link message too long", kind=type(message).__name__, bytes=len(content))
            return False
        try:
            if isinstance(message, HandoverBegins):
                socket.send_fds(self._socket, [content], [message.fd])
            else:
                self._socket.send(content)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Iterator[LinkMessage]:
        """Returns every waiting message.

        EOFError: the other end is closed; MalformedError: see `decode`.
        """
        while True:
            try:
                content, descriptors, _, _ = socket.recv_fds(self._socket, _MESSAGE_LENGTH_BYTES, 1)
            except BlockingIOError:
                return
            except ConnectionResetError as error:
                raise EOFError("the link is closed") from error
            if not content:
                raise EOFError("the link is closed")
            yield _with_descriptor(content, descriptors)

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()


def encode(message: LinkMessage) -> bytes:
    """Encodes a message as one datagram: the name of its class, and its fields."""
    document = [type(message).__name__, to_json(message)]
    return json.dumps(document, separators=(",", ":")).encode()


def decode(content: bytes) -> LinkMessage:
    """Decodes a datagram; MalformedError: the two processes are of different releases."""
    try:
        name, document = json.loads(content)
        message: LinkMessage = from_json(_KINDS[name], document)
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedError(f"link message {content[:100]!r}: {error}") from error
    return message


def _with_descriptor(content: bytes, descriptors: list[int]) -> LinkMessage:
    """Decodes a message that came with these descriptors; closes those that are not used."""
    try:
        message = decode(content)
        if isinstance(message, HandoverBegins):
            if not descriptors:  # this process has no room for another one
                raise MalformedError("a hand-over begins without its socket")
            fd = descriptors.pop()
            os.set_inheritable(fd, False)  # noqa: FBT003 - the standard library's signature
            return replace(message, fd=fd)
        return message
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
