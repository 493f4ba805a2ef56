"""Every reason for refusing a request or a message: the one list of server and SDK.

A reason is stable: its name and meaning never change, and new ones may be added. On the wire it is
the `reason` of google.rpc.ErrorInfo with domain `DOMAIN`, or of an Error in a result. Its kind says
what a caller may do about it:

| kind | retry_helps | outcome_known | meaning |
|---|---|---|---|
| FINAL | no | yes | not accepted, and never will be as it is |
| PASSING | yes | yes | not accepted now; the same id and due may be, later or by another node |
| UNKNOWN | yes | no | perhaps accepted; retrying with the same id and due makes no second copy |
"""

from enum import StrEnum
from typing import Final, NamedTuple, Self

from grpc import StatusCode

DOMAIN: Final = "delaywheel"
"""The `domain` of every google.rpc.ErrorInfo that is ours."""


class _Kind(NamedTuple):
    retry_helps: bool
    outcome_known: bool


_FINAL = _Kind(retry_helps=False, outcome_known=True)
_PASSING = _Kind(retry_helps=True, outcome_known=True)
_UNKNOWN = _Kind(retry_helps=True, outcome_known=False)

_EXHAUSTED = StatusCode.RESOURCE_EXHAUSTED
_FORBIDDEN = StatusCode.PERMISSION_DENIED
_INTERNAL = StatusCode.INTERNAL
_INVALID = StatusCode.INVALID_ARGUMENT
_NOT_FOUND = StatusCode.NOT_FOUND
_PRECONDITION = StatusCode.FAILED_PRECONDITION
_RANGE = StatusCode.OUT_OF_RANGE
_UNAVAILABLE = StatusCode.UNAVAILABLE


class Reason(StrEnum):
    """Why something was refused; a member's name is its value. `advice` says what to do.

    Example:
        >>> Reason.DRAINING.code.name, Reason.DRAINING.retry_helps
        ('UNAVAILABLE', True)
        >>> Reason["HEADER_RESERVED"].advice
        "Rename the header: names that begin with 'dw-' are the service's; 'dw-retry-' is free."
    """

    code: StatusCode
    retry_helps: bool
    outcome_known: bool
    advice: str

    def __new__(cls, name: str, code: StatusCode, kind: _Kind, advice: str) -> Self:
        """Creates the member for one row of the table below."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.code = code
        member.retry_helps, member.outcome_known = kind
        member.advice = advice
        return member

    @property
    def code_number(self) -> int:
        """The number in google.rpc.Code, for the `code` of an Error."""
        number: int = self.code.value[0]
        return number

    # A message's due.
    DUE_MISSING = ("DUE_MISSING", _INVALID, _FINAL, "Give one of deliver_at, delay and level.")
    DUE_AMBIGUOUS = (
        "DUE_AMBIGUOUS",
        _INVALID,
        _FINAL,
        "Give only one of deliver_at, delay and level.",
    )
    DUE_INVALID = (
        "DUE_INVALID",
        _INVALID,
        _FINAL,
        "Give a due in Unix milliseconds above 0; from Python, a datetime with a time zone.",
    )
    DUE_BEYOND_SPAN = (
        "DUE_BEYOND_SPAN",
        _RANGE,
        _FINAL,
        "Choose a nearer due, or let the operator raise span_seconds.",
    )
    DUE_TOO_OLD = (
        "DUE_TOO_OLD",
        _RANGE,
        _FINAL,
        "Its due is past the late window: if it was never accepted, send it as a new message.",
    )
    DUE_PASSED = (
        "DUE_PASSED",
        _RANGE,
        _FINAL,
        "The due was past at the first attempt, which past_due='reject' refuses.",
    )
    DELAY_INVALID = ("DELAY_INVALID", _INVALID, _FINAL, "Give a delay of zero or more.")
    LEVEL_UNKNOWN = (
        "LEVEL_UNKNOWN",
        _INVALID,
        _FINAL,
        "Use a level that DescribeCluster lists, or a delay.",
    )
    SENT_AT_MISSING = (
        "SENT_AT_MISSING",
        _INVALID,
        _FINAL,
        "An id of your own with a delay or level needs sent_at_ms, so that a retry keeps its due.",
    )
    # The rest of a message.
    ID_INVALID = ("ID_INVALID", _INVALID, _FINAL, "Give an id of exactly 16 bytes, or none.")
    ID_TAKEN = (
        "ID_TAKEN",
        _PRECONDITION,
        _FINAL,
        "A message with other contents has this topic, id and due: give a new message a new id.",
    )
    ID_CANCELLED = (
        "ID_CANCELLED",
        _PRECONDITION,
        _FINAL,
        "The message with this topic, id and due was cancelled, and stays so: give it a new id.",
    )
    TOPIC_INVALID = (
        "TOPIC_INVALID",
        _INVALID,
        _FINAL,
        "Name a topic with 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-', other than '.' and '..'.",
    )
    TOPIC_UNKNOWN = (
        "TOPIC_UNKNOWN",
        _NOT_FOUND,
        _FINAL,
        "Create the topic in Kafka first (delaywheel topic create), or correct its name.",
    )
    MESSAGE_TOO_LARGE = (
        "MESSAGE_TOO_LARGE",
        _INVALID,
        _FINAL,
        "Make key, value and headers smaller than what the service and the topic take.",
    )
    HEADER_RESERVED = (
        "HEADER_RESERVED",
        _INVALID,
        _FINAL,
        "Rename the header: names that begin with 'dw-' are the service's; 'dw-retry-' is free.",
    )
    HEADER_INVALID = (
        "HEADER_INVALID",
        _INVALID,
        _FINAL,
        "Give every header a name in UTF-8 that is not empty and has no U+0000.",
    )
    PARTITION_INVALID = (
        "PARTITION_INVALID",
        _INVALID,
        _FINAL,
        "Give a partition that the topic has, or none.",
    )
    TIMESTAMP_INVALID = (
        "TIMESTAMP_INVALID",
        _INVALID,
        _FINAL,
        "Give a timestamp of one or more Unix milliseconds, or none.",
    )
    SLOT_FULL = (
        "SLOT_FULL",
        _EXHAUSTED,
        _FINAL,
        "That second holds 4 GiB on this node: choose another second, or send to another node.",
    )
    # A request as a whole.
    REQUEST_MALFORMED = (
        "REQUEST_MALFORMED",
        _INVALID,
        _FINAL,
        "Correct the request: its columns, lengths and blob must agree.",
    )
    TOO_MANY_MESSAGES = (
        "TOO_MANY_MESSAGES",
        _INVALID,
        _FINAL,
        "Split the request: DescribeCluster gives max_request_messages.",
    )
    REQUEST_TOO_LARGE = (
        "REQUEST_TOO_LARGE",
        _INVALID,
        _FINAL,
        "Split the request: DescribeCluster gives max_request_bytes.",
    )
    # The state of the service.
    BACKPRESSURE = (
        "BACKPRESSURE",
        _EXHAUSTED,
        _PASSING,
        "Too much is in flight: retry after the delay in RetryInfo.",
    )
    QUOTA_EXCEEDED = (
        "QUOTA_EXCEEDED",
        _EXHAUSTED,
        _PASSING,
        "Retry after the delay in RetryInfo; `delaywheel whoami` shows the quotas.",
    )
    DRAINING = ("DRAINING", _UNAVAILABLE, _PASSING, "The node is stopping: use another node.")
    NO_WHEEL = (
        "NO_WHEEL",
        _UNAVAILABLE,
        _PASSING,
        "The node has no open wheel (starting, or Kafka is away): retry, or use another node.",
    )
    NOT_ENOUGH_REPLICAS = (
        "NOT_ENOUGH_REPLICAS",
        _UNAVAILABLE,
        _PASSING,
        "Too few members are in sync, or they answer too slowly: retry, or use another node.",
    )
    DISK_FULL = (
        "DISK_FULL",
        _EXHAUSTED,
        _PASSING,
        "The node's disk is at its reserve, which forwarding frees: retry, or use another node.",
    )
    DISK_STALLED = (
        "DISK_STALLED",
        _UNAVAILABLE,
        _PASSING,
        "The node's disk does not respond: use another node, or retry later.",
    )
    CLOCK_AHEAD = (
        "CLOCK_AHEAD",
        _UNAVAILABLE,
        _PASSING,
        "The node's clock is far ahead of the others': use another node, and correct the clock.",
    )
    WHEEL_LOST = (
        "WHEEL_LOST",
        _UNAVAILABLE,
        _UNKNOWN,
        "The outcome is unknown: retry with the same id and due.",
    )
    INTERNAL = (
        "INTERNAL",
        _INTERNAL,
        _UNKNOWN,
        "A defect of the service: retry with the same id and due, and look at its log.",
    )
    # Reading and cancelling messages.
    HANDLE_INVALID = (
        "HANDLE_INVALID",
        _INVALID,
        _FINAL,
        "Give a handle as it was returned: <wheel>:<slot>:<id in 32 hex digits>:<topic>.",
    )
    HANDLE_AMBIGUOUS = (
        "HANDLE_AMBIGUOUS",
        _INVALID,
        _FINAL,
        "Give either a handle, or topic, id and due; these where a handle fits several messages.",
    )
    MESSAGE_NOT_FOUND = (
        "MESSAGE_NOT_FOUND",
        _NOT_FOUND,
        _FINAL,
        "It was never accepted, or is finished and its second is deleted.",
    )
    NOT_UP_TO_DATE = (
        "NOT_UP_TO_DATE",
        _UNAVAILABLE,
        _PASSING,
        "The node misses frames that others hold and cannot answer yet: retry.",
    )
    NO_LEADER = (
        "NO_LEADER",
        _UNAVAILABLE,
        _PASSING,
        "No node leads at the moment: retry; pending messages are kept.",
    )
    CANCEL_UNKNOWN = (
        "CANCEL_UNKNOWN",
        _UNAVAILABLE,
        _UNKNOWN,
        "The cancel was written, but is not confirmed yet: ask again for its outcome.",
    )
    RESCHEDULE_UNKNOWN = (
        "RESCHEDULE_UNKNOWN",
        _UNAVAILABLE,
        _UNKNOWN,
        "It was asked for and not yet seen to be decided: ask again, with the same new due.",
    )
    RESCHEDULES_BUSY = (
        "RESCHEDULES_BUSY",
        _EXHAUSTED,
        _PASSING,
        "256 messages are being given other dues, each for about a second: retry.",
    )
    RESCHEDULES_RESTING = (
        "RESCHEDULES_RESTING",
        _PRECONDITION,
        _FINAL,
        "Forwarding was set back, and what it did early is still to come: reschedule after that.",
    )
    DUE_TAKEN = (
        "DUE_TAKEN",
        _PRECONDITION,
        _FINAL,
        "A message with this id had that due before: choose another millisecond.",
    )
    # Half messages.
    HALF_INVALID = (
        "HALF_INVALID",
        _INVALID,
        _FINAL,
        "A half has a group (dw-half) of 1 to 200 of a-z A-Z 0-9 . _ -, and a hold of up to 10 s.",
    )
    HALVES_OFF = (
        "HALVES_OFF",
        _PRECONDITION,
        _FINAL,
        "Half messages are off here: have ingress lead to all topics, and halves not false.",
    )
    HALVES_UNAVAILABLE = (
        "HALVES_UNAVAILABLE",
        _PRECONDITION,
        _FINAL,
        "No group can be asked, or heard: have an operator do what the message says, and repeat.",
    )
    HALVES_NOT_READY = (
        "HALVES_NOT_READY",
        _UNAVAILABLE,
        _PASSING,
        "A leader has still to see that all nodes know half messages, and to read ingress: retry.",
    )
    HALF_KEEPS_DUE = (
        "HALF_KEEPS_DUE",
        _PRECONDITION,
        _FINAL,
        "A commit names the half by its due: cancel it, and begin another with the due you want.",
    )
    SLOT_INVALID = ("SLOT_INVALID", _INVALID, _FINAL, "Give a slot in Unix seconds above 0.")
    PAGE_TOKEN_INVALID = (
        "PAGE_TOKEN_INVALID",
        _INVALID,
        _FINAL,
        "Give next_page_token as it was returned, for the same slot.",
    )
    FILTER_MISSING = (
        "FILTER_MISSING",
        _INVALID,
        _FINAL,
        "Say which messages: by topic, key, header or id; a time alone is not enough.",
    )
    SEARCHES_BUSY = (
        "SEARCHES_BUSY",
        _EXHAUSTED,
        _PASSING,
        "Too many searches are running: retry later, or ask another node.",
    )
    # Who may do what.
    FORBIDDEN = (
        "FORBIDDEN",
        _FORBIDDEN,
        _FINAL,
        "Let the operator grant it (the file `grants`); `delaywheel whoami` shows what is granted.",
    )
    TOKEN_UNKNOWN = (
        "TOKEN_UNKNOWN",
        StatusCode.UNAUTHENTICATED,
        _FINAL,
        "Give a token whose SHA-256 is in the node's file `tokens`.",
    )
    CERTIFICATE_EXPIRED = (
        "CERTIFICATE_EXPIRED",
        StatusCode.UNAUTHENTICATED,
        _FINAL,
        "Show a new certificate: the one of this connection is no longer valid.",
    )
    NODE_UNPROVEN = (
        "NODE_UNPROVEN",
        _UNAVAILABLE,
        _PASSING,
        "The call claims to be a node's, without this node's secret: nodes that connect learn it.",
    )
    # What operators do with nodes.
    NODE_UNKNOWN = (
        "NODE_UNKNOWN",
        _NOT_FOUND,
        _FINAL,
        "No member and no former node has this id: delaywheel status lists the members.",
    )
    NODE_NOT_HEARD = (
        "NODE_NOT_HEARD",
        _UNAVAILABLE,
        _PASSING,
        "Start the node on its new folder first, and see that the leader's node reaches it.",
    )
    NOTHING_TO_REPLACE = (
        "NOTHING_TO_REPLACE",
        _PRECONDITION,
        _FINAL,
        "The data folder that the node runs on is the registered one: there is nothing to do.",
    )
    STORAGE_ROLLED_BACK = (
        "STORAGE_ROLLED_BACK",
        _PRECONDITION,
        _FINAL,
        "Its folder is an older copy: put back the newest, or start it on an empty one first.",
    )
    NODE_LEADS = (
        "NODE_LEADS",
        _PRECONDITION,
        _FINAL,
        "Stop this node first, so that another one leads, and take it out of members.",
    )
    NODE_IN_USE = (
        "NODE_IN_USE",
        _PRECONDITION,
        _FINAL,
        "Stop the node, take it out of members of all others and restart them, then remove it.",
    )
    NODE_CHANGE_UNKNOWN = (
        "NODE_CHANGE_UNKNOWN",
        _UNAVAILABLE,
        _UNKNOWN,
        "The change was requested, but is not confirmed yet: ask again.",
    )
    # What operators do about a clock that was ahead.
    NOTHING_TO_SET_BACK = (
        "NOTHING_TO_SET_BACK",
        _PRECONDITION,
        _FINAL,
        "Forwarding is not ahead of the clock of the leader's node: it continues on its own.",
    )
    SET_BACK_TOO_OFTEN = (
        "SET_BACK_TOO_OFTEN",
        _PRECONDITION,
        _FINAL,
        "It was set back several times; wait until the messages that went out early are due.",
    )
    SET_BACK_UNKNOWN = (
        "SET_BACK_UNKNOWN",
        _UNAVAILABLE,
        _UNKNOWN,
        "The change was requested, but is not confirmed yet: ask again.",
    )

    @classmethod
    def of(cls, text: str) -> "Reason | None":
        """Returns the reason of this name; None if only a newer server knows it."""
        return cls.__members__.get(text)
