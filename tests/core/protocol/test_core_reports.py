import pytest
from confluent_kafka import KafkaError

from delaywheel_replica.core.protocol.transaction_outcomes import (
    ACTIONS,
    VERDICTS,
    Action,
    Call,
    LibraryAnswer,
    TransactionState,
    answer_of,
)

ENDINGS = {
    TransactionState.COMMITTED,
    TransactionState.COMMITTED_LOOSE,
    TransactionState.ABORTED,
    TransactionState.ABANDONED,
    TransactionState.TAKEN,
    TransactionState.UNKNOWN,
    TransactionState.FENCED,
}
BEFORE_ANY_END = {Call.BEGIN, Call.PRODUCE, Call.FLUSH, Call.ABORT}


def test_every_call_with_every_answer_has_a_verdict() -> None:
    assert set(VERDICTS) == {(call, answer) for call in Call for answer in LibraryAnswer}
    assert set(ACTIONS) == ENDINGS


def test_only_success_of_a_commit_is_a_commit() -> None:
    committed = {key: verdict for key, verdict in VERDICTS.items() if verdict.is_committed}
    assert committed == {
        (Call.COMMIT, LibraryAnswer.OK): TransactionState.COMMITTED,
        (Call.COMMIT, LibraryAnswer.OK_RETRIED): TransactionState.COMMITTED_LOOSE,
    }


@pytest.mark.parametrize("call", Call)
def test_only_what_may_have_been_committed_is_unknown(call: Call) -> None:
    unknown = call not in BEFORE_ANY_END
    wanted = TransactionState.UNKNOWN if unknown else TransactionState.ABANDONED
    assert VERDICTS[call, LibraryAnswer.TIMED_OUT] is wanted
    fenced = TransactionState.FENCED if unknown else TransactionState.TAKEN
    assert VERDICTS[call, LibraryAnswer.FENCED] is fenced


def test_an_end_that_was_perhaps_sent_twice_ends_the_use_of_its_epoch() -> None:
    for call in (Call.COMMIT, Call.ABORT):
        verdict = VERDICTS[call, LibraryAnswer.OK_RETRIED]
        assert ACTIONS[verdict] is Action.INIT_ID_AGAIN


def test_an_abort_is_asked_for_only_while_no_end_was_sent() -> None:
    aborting = {
        call for (call, _), verdict in VERDICTS.items() if verdict is TransactionState.ABORT
    }
    assert aborting == {Call.PRODUCE, Call.FLUSH}


def test_only_a_known_outcome_lets_a_leader_go_on() -> None:
    assert {verdict for verdict, action in ACTIONS.items() if action is Action.GO_ON} == {
        TransactionState.COMMITTED,
        TransactionState.ABORTED,
    }
    assert ACTIONS[TransactionState.TAKEN] is Action.INIT_ID_LATER
    assert ACTIONS[TransactionState.FENCED] is Action.STAND_BY


@pytest.mark.parametrize(
    ("code", "requires_abort", "retried", "answer"),
    [
        (None, False, False, LibraryAnswer.OK),
        (None, False, True, LibraryAnswer.OK_RETRIED),
        (KafkaError._FENCED, False, False, LibraryAnswer.FENCED),
        (KafkaError._FENCED, True, True, LibraryAnswer.FENCED),
        (KafkaError.INVALID_PRODUCER_EPOCH, True, False, LibraryAnswer.FENCED),
        (KafkaError._TIMED_OUT, False, False, LibraryAnswer.TIMED_OUT),
        (KafkaError._MSG_TIMED_OUT, True, False, LibraryAnswer.REQUIRES_ABORT),
        (KafkaError.REQUEST_TIMED_OUT, False, False, LibraryAnswer.TIMED_OUT),
        (KafkaError.MSG_SIZE_TOO_LARGE, False, False, LibraryAnswer.FAILED),
        (KafkaError.INVALID_TXN_STATE, False, False, LibraryAnswer.FAILED),
        (KafkaError._FATAL, False, False, LibraryAnswer.FAILED),
    ],
)
def test_the_librarys_codes(
    code: int | None, requires_abort: bool, retried: bool, answer: LibraryAnswer
) -> None:
    name = None if code is None else KafkaError(code).name()
    assert answer_of(name, requires_abort=requires_abort, retried=retried) is answer
