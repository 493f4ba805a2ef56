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
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    RescheduleProposal,
    RescheduleWritten,
)
from delaywheel_replica.process.inheritance import LINK_FD_VARIABLE
from delaywheel_replica.process.logs import get_logger

_MESSAGE_LENGTH_BYTES = 64 * 1024
"""No message is longer. The kernel's default bound on one datagram is 208 KiB."""
_TOPICS_LENGTH_BYTES = 16 * 1024
"""The length of a message with many topics, roughly: a nearly full buffer still accepts one."""
_TOPIC_LENGTH_BYTES = 32
"""What an entry takes besides its name, at most."""

log = get_logger(__name__)


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
    """Registers an operator's choice of a node's storage; None: the node is removed."""

    node: str
    storage: str | None


@dataclass(frozen=True, slots=True)
class SetBack:
    """Requests that w be set back to the clock, as an operator wishes."""

    set_backs: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The node is stopping cleanly."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """What the server needs to know of a topic.

    ``max_message_bytes`` is None if Kafka does not report it.
    """

    partitions: int
    max_message_bytes: int | None


@dataclass(frozen=True, slots=True)
class Topics:
    """Kafka's answers about some topics. Each message is complete in itself.

    Attributes:
        topics: Those that are there.
        absent: Names asked for that Kafka, answering without an error, does not have.
        checked_at_ms: ``time.monotonic`` in ms, taken before Kafka was asked. The monotonic clock
            is the machine's, shared by both processes.
    """

    topics: Mapping[str, TopicInfo]
    checked_at_ms: int
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message, and why it became a dead letter."""

    id: bytes
    due_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """Messages that were committed as dead letters.

    Attributes:
        cleaner_ms: When the cleaner started, as its row says.
        before: How many it had counted before, since then. If fewer were reported,
            some were dropped on the way.
        letters: In the order in which they were written.
    """

    cleaner_ms: int
    before: int
    letters: tuple[DeadLetter, ...]


@dataclass(frozen=True, slots=True)
class AskPlace:
    """Asks where the record of a finished message is.

    Attributes:
        question: Identifies the answer.
        id: The message's id.
        due_ms: The message's due.
        topic: The message's topic.
        timestamp_ms: The timestamp that its caller set; None: none.
        is_dead: Whether it is a dead letter; None: unknown.
        is_named_by_cancel: It may have been cancelled instead: look among the outcomes too.
        is_asked_half: Its group is asked, or was: look for the answer too.
        early_ms: How long before its due it may have been done: a half message is at its commit.
    """

    question: int
    id: bytes
    due_ms: int
    topic: str
    timestamp_ms: int | None = None
    is_dead: bool | None = None
    is_named_by_cancel: bool = False
    is_asked_half: bool = False
    early_ms: int = 0


class LinkPlace(NamedTuple):
    """One record in Kafka."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlaceFound:
    """The answer to `AskPlace`.

    Attributes:
        question: Which question.
        place: None: the record was not found, which proves nothing.
        dead_reason: Why it is a dead letter, if the place is that of one.
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
        format: The format of what the socket carries.
        fd: The server's end of the socket. The sender keeps its descriptor, and may close it; the
            receiver gets one of its own, and has to close it.
    """

    format: int
    fd: int = field(default=-1, compare=False)


LETTERS_AT_MOST = 200
"""The most letters in one message: some 16 KiB."""

Message: TypeAlias = (
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


class LinkMessageError(ValueError):
    """A message cannot be understood: the two processes are of different releases."""


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

    def send(self, message: Message) -> bool:
        """Sends a message, or drops it if it is too long or the buffer is full.

        Returns:
            Whether it was sent. False also when the other end is gone for good.
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

    def receive(self) -> Iterator[Message]:
        """Returns every waiting message.

        Raises:
            EOFError: The other end is closed.
            LinkMessageError: A message cannot be understood.
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


def encode(message: Message) -> bytes:
    """Encodes a message as one datagram."""
    return json.dumps(_document(message), separators=(",", ":")).encode()


def decode(content: bytes) -> Message:
    """Decodes the message in a datagram.

    Raises:
        LinkMessageError: It cannot be understood.
    """
    try:
        document = json.loads(content)
        return _message(document)
    except (ValueError, KeyError, TypeError) as error:
        raise LinkMessageError(f"link message {content[:100]!r}: {error}") from error


def _with_descriptor(content: bytes, descriptors: list[int]) -> Message:
    """Decodes a message that came with these descriptors; closes those that are not used."""
    try:
        message = decode(content)
        if isinstance(message, HandoverBegins):
            if not descriptors:  # this process has no room for another one
                raise LinkMessageError("a hand-over begins without its socket")
            fd = descriptors.pop()
            os.set_inheritable(fd, False)  # noqa: FBT003 - the standard library's signature
            return replace(message, fd=fd)
        return message
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


_PLAIN: dict[str, type[Wake | CommitSoon | StopRequested]] = {
    "wake": Wake,
    "commit": CommitSoon,
    "stop": StopRequested,
}
_PLAIN_NAMES = {kind: name for name, kind in _PLAIN.items()}


def _document(message: Message) -> dict[str, Any]:
    match message:
        case AskTopic():
            document: dict[str, Any] = {"type": "topic", "name": message.name}
        case NodeStorage():
            document = {"type": "node", "node": message.node, "storage": message.storage}
        case SetBack():
            document = {"type": "set back", "set_backs": message.set_backs}
        case RescheduleProposal() | RescheduleWritten():
            document = _reschedule_document(message)
        case Topics():
            document = {
                "type": "topics",
                "topics": {
                    name: [info.partitions, info.max_message_bytes]
                    for name, info in message.topics.items()
                },
                "absent": list(message.absent),
                "checked_at_ms": message.checked_at_ms,
            }
        case DeadLettered():
            document = {
                "type": "dead",
                "cleaner_ms": message.cleaner_ms,
                "before": message.before,
                "letters": [[each.id.hex(), each.due_ms, each.reason] for each in message.letters],
            }
        case AskPlace() | PlaceFound():
            document = _place_document(message)
        case HandoverBegins():
            document = {"type": "handover", "format": message.format}
        case Wake() | CommitSoon() | StopRequested():
            document = {"type": _PLAIN_NAMES[type(message)]}
    return document


def _message(document: dict[str, Any]) -> Message:
    kind = document["type"]
    if kind in _PLAIN:
        return _PLAIN[kind]()
    message: Message
    match kind:
        case "topic":
            message = AskTopic(str(document["name"]))
        case "node":
            storage = document["storage"]
            message = NodeStorage(str(document["node"]), None if storage is None else str(storage))
        case "set back":
            message = SetBack(int(document["set_backs"]))
        case "reschedule" | "rescheduled":
            message = _reschedule(document)
        case "topics":
            message = Topics(
                topics={
                    name: TopicInfo(int(partitions), None if limit is None else int(limit))
                    for name, (partitions, limit) in document["topics"].items()
                },
                checked_at_ms=int(document["checked_at_ms"]),
                absent=tuple(document["absent"]),
            )
        case "dead":
            message = DeadLettered(
                cleaner_ms=int(document["cleaner_ms"]),
                before=int(document["before"]),
                letters=tuple(
                    DeadLetter(bytes.fromhex(id_), int(due_ms), str(reason))
                    for id_, due_ms, reason in document["letters"]
                ),
            )
        case "place" | "place found":
            message = _place_message(document)
        case "handover":
            message = HandoverBegins(int(document["format"]))
        case _:
            raise LinkMessageError(f"unknown type {kind!r}")
    return message


def _place_document(message: AskPlace | PlaceFound) -> dict[str, Any]:
    if isinstance(message, PlaceFound):
        return {"type": "place found", **asdict(message)}
    return {"type": "place", **asdict(message), "id": message.id.hex()}


def _place_message(document: dict[str, Any]) -> AskPlace | PlaceFound:
    question = int(document["question"])
    if document["type"] == "place found":
        place, reason = document["place"], document["dead_reason"]
        answer = document["answer"]
        return PlaceFound(
            question,
            None if place is None else LinkPlace(str(place[0]), int(place[1]), int(place[2])),
            None if reason is None else str(reason),
            None if document["outcome"] is None else str(document["outcome"]),
            None if answer is None else str(answer),
        )
    timestamp_ms, is_dead = document["timestamp_ms"], document["is_dead"]
    return AskPlace(
        question,
        bytes.fromhex(document["id"]),
        int(document["due_ms"]),
        str(document["topic"]),
        timestamp_ms=None if timestamp_ms is None else int(timestamp_ms),
        is_dead=None if is_dead is None else bool(is_dead),
        is_named_by_cancel=bool(document["is_named_by_cancel"]),
        is_asked_half=bool(document["is_asked_half"]),
        early_ms=int(document["early_ms"]),
    )


def _reschedule_document(message: RescheduleProposal | RescheduleWritten) -> dict[str, Any]:
    document: dict[str, Any] = {"key": _key_document(message.key), "to_ms": message.to_ms}
    if isinstance(message, RescheduleProposal):
        looked = [[str(wheel), seq] for wheel, seq in message.looked]
        return document | {
            "type": "reschedule",
            "place": str(message.place),
            "looked": looked,
            "chosen_ms": message.chosen_ms,
        }
    return document | {
        "type": "rescheduled",
        "copy": [str(message.copy[0]), message.copy[1]],
        "cancel": None if message.cancel is None else [str(message.cancel[0]), message.cancel[1]],
    }


def _reschedule(document: dict[str, Any]) -> RescheduleProposal | RescheduleWritten:
    key, to_ms = _key(document["key"]), int(document["to_ms"])
    if document["type"] == "reschedule":
        looked = tuple(map(_frame, document["looked"]))
        chosen_ms = None if document["chosen_ms"] is None else int(document["chosen_ms"])
        place = Position.parse(document["place"])
        return RescheduleProposal(key, to_ms, place, looked, chosen_ms)
    cancel = None if document["cancel"] is None else _frame(document["cancel"])
    return RescheduleWritten(key, to_ms, _frame(document["copy"]), cancel)


def _key_document(key: MessageKey) -> list[Any]:
    id_, due_ms = key
    return [id_.hex(), due_ms]


def _key(document: list[Any]) -> MessageKey:
    return bytes.fromhex(document[0]), int(document[1])


def _frame(document: list[Any]) -> tuple[WheelId, int]:
    return WheelId.parse(document[0]), int(document[1])
