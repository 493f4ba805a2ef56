"""What a transactional producer's calls report, and what each report means.

librdkafka speaks the older transaction protocol, in which a late copy of an EndTxn ends a later
transaction of the producer epoch in the middle: docs/PROTOCOL.md, "What the client sends again",
says what follows. Whether a commit counts that failed or was not answered, only the control topic
shows: that takes a new candidacy, which inits every id.

Two tables, both total:

- `VERDICTS`: (call, answer) -> how the transaction continues or ended.
- `ACTIONS`: ending -> what the leader does next.

ABORT, ABANDONED and TAKEN are chosen only while no EndTxn that commits can have been sent: the
transaction will never be committed. After a commit call that failed, no abort helps: its EndTxn may
still be under way.
"""

from enum import StrEnum


class Call(StrEnum):
    """A call of the transactional producer."""

    INIT = "init_transactions"
    BEGIN = "begin_transaction"
    PRODUCE = "produce"
    FLUSH = "flush"
    COMMIT = "commit_transaction"
    ABORT = "abort_transaction"


class LibraryAnswer(StrEnum):
    """What the library reported."""

    OK = "ok"
    """Success, and the library cannot have sent the request twice."""
    OK_RETRIED = "ok, retried"
    """Success, but a request that ends a transaction may have been sent twice."""
    TIMED_OUT = "timed out"
    FENCED = "fenced"
    """This transactional id was inited: by another candidate, or by a late copy of our own init."""
    REQUIRES_ABORT = "requires abort"
    """This transaction has failed, the producer has not."""
    FAILED = "failed"
    """Anything else."""


class TransactionState(StrEnum):
    """The state of a transaction after a call."""

    CONTINUE = "continue"
    """The next call may be made."""
    ABORT = "abort"
    """The transaction can no longer be committed: abort it."""
    COMMITTED = "committed"
    """Ended: committed, nothing is under way."""
    COMMITTED_LOOSE = "committed, loose"
    """Ended: committed, but a copy of its end may be under way."""
    ABORTED = "aborted"
    """Ended: aborted, nothing is under way."""
    ABANDONED = "abandoned"
    """Ended for us: not committed, and never will be; open or aborted, with copies of requests."""
    TAKEN = "taken"
    """Ended for us: not committed, and never will be; its id was inited by somebody."""
    UNKNOWN = "unknown"
    """Ended for us: committed or not."""
    FENCED = "fenced"
    """Ended for us: its id was inited by somebody; committed or not."""

    @property
    def is_committed(self) -> bool:
        """Whether what was written is known to count."""
        return self in {TransactionState.COMMITTED, TransactionState.COMMITTED_LOOSE}


class Action(StrEnum):
    """What a leader does after a transaction."""

    GO_ON = "go on"
    INIT_ID_AGAIN = "go on, and init this id again"
    INIT_ID_LATER = "go on, and init this id again once another has committed"
    NEW_CANDIDACY = "new candidacy"
    STAND_BY = "stand by"


_C, _A, _X = TransactionState.CONTINUE, TransactionState.ABORT, TransactionState.ABANDONED
_T, _U, _F = TransactionState.TAKEN, TransactionState.UNKNOWN, TransactionState.FENCED
_ROWS: dict[Call, tuple[TransactionState, ...]] = {
    # as LibraryAnswer:  OK, OK_RETRIED, TIMED_OUT, FENCED, REQUIRES_ABORT, FAILED
    Call.INIT: (_C, _C, _U, _F, _U, _U),
    Call.BEGIN: (_C, _C, _X, _T, _X, _X),
    # A failed produce was refused before anything was sent: too large, no such partition.
    Call.PRODUCE: (_C, _C, _X, _T, _A, _A),
    Call.FLUSH: (_C, _C, _X, _T, _A, _X),
    Call.COMMIT: (TransactionState.COMMITTED, TransactionState.COMMITTED_LOOSE, _U, _F, _U, _U),
    Call.ABORT: (TransactionState.ABORTED, _X, _X, _T, _X, _X),
}

VERDICTS: dict[tuple[Call, LibraryAnswer], TransactionState] = {
    (call, answer): verdict
    for call, row in _ROWS.items()
    for answer, verdict in zip(LibraryAnswer, row, strict=True)
}

ACTIONS = {
    TransactionState.COMMITTED: Action.GO_ON,
    TransactionState.COMMITTED_LOOSE: Action.INIT_ID_AGAIN,
    TransactionState.ABORTED: Action.GO_ON,
    TransactionState.ABANDONED: Action.INIT_ID_AGAIN,
    TransactionState.TAKEN: Action.INIT_ID_LATER,
    TransactionState.UNKNOWN: Action.NEW_CANDIDACY,
    TransactionState.FENCED: Action.STAND_BY,
}
"""For the seven ways in which a transaction ends; CONTINUE and ABORT are no endings."""

_FENCED_CODES = frozenset({"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"})
_TIMED_OUT_CODES = frozenset(
    {"_TIMED_OUT", "_TIMED_OUT_QUEUE", "REQUEST_TIMED_OUT", "_MSG_TIMED_OUT"}
)


def is_fenced(cause: str) -> bool:
    """Whether an error of Kafka, which begins with its code, means fencing by another candidate."""
    return cause.partition(":")[0] in _FENCED_CODES


def answer_of(
    code: str | None, *, requires_abort: bool = False, retried: bool = False
) -> LibraryAnswer:
    """Interprets a report of the library.

    Args:
        code: The name of its error code, e.g. ``_FENCED``; None: success.
        requires_abort: The library says that the transaction must be aborted.
        retried: The library may have sent the request more than once, and that matters.
    """
    if code is None:
        return LibraryAnswer.OK_RETRIED if retried else LibraryAnswer.OK
    if code in _FENCED_CODES:
        return LibraryAnswer.FENCED
    if requires_abort:
        return LibraryAnswer.REQUIRES_ABORT
    if code in _TIMED_OUT_CODES:
        return LibraryAnswer.TIMED_OUT
    return LibraryAnswer.FAILED
