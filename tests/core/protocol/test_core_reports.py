import pytest
from confluent_kafka import KafkaError

from delaywheel_replica.core.protocol.transaction_outcomes import (
    ACTIONS,
    VERDICTS,
    Action,
    Answer,
    Call,
    Verdict,
    answer_of,
)

ENDINGS = {Verdict.COMMITTED, Verdict.ABORTED, Verdict.UNKNOWN, Verdict.FENCED}


def test_every_call_with_every_answer_has_a_verdict() -> None:
    assert set(VERDICTS) == {(call, answer) for call in Call for answer in Answer}
    assert set(ACTIONS) == ENDINGS


def test_only_a_clean_success_is_a_known_outcome() -> None:
    known = {key: verdict for key, verdict in VERDICTS.items() if verdict is not Verdict.UNKNOWN}
    assert {key for key, verdict in known.items() if verdict is Verdict.COMMITTED} == {
        (Call.COMMIT, Answer.OK)
    }
    assert {key for key, verdict in known.items() if verdict is Verdict.ABORTED} == {
        (Call.ABORT, Answer.OK)
    }


@pytest.mark.parametrize("call", Call)
def test_what_was_perhaps_sent_twice_or_timed_out_is_unknown(call: Call) -> None:
    assert VERDICTS[call, Answer.OK_RETRIED] is Verdict.UNKNOWN
    assert VERDICTS[call, Answer.TIMED_OUT] is Verdict.UNKNOWN
    assert VERDICTS[call, Answer.FENCED] is Verdict.FENCED


def test_an_abort_is_asked_for_only_while_no_end_was_sent() -> None:
    aborting = {call for (call, _), verdict in VERDICTS.items() if verdict is Verdict.ABORT}
    assert aborting == {Call.PRODUCE, Call.FLUSH}


def test_only_a_known_outcome_lets_a_leader_go_on() -> None:
    assert {verdict for verdict, action in ACTIONS.items() if action is Action.GO_ON} == {
        Verdict.COMMITTED,
        Verdict.ABORTED,
    }
    assert ACTIONS[Verdict.FENCED] is Action.STAND_BY


@pytest.mark.parametrize(
    ("code", "requires_abort", "retried", "answer"),
    [
        (None, False, False, Answer.OK),
        (None, False, True, Answer.OK_RETRIED),
        (KafkaError._FENCED, False, False, Answer.FENCED),
        (KafkaError._FENCED, True, True, Answer.FENCED),
        (KafkaError.INVALID_PRODUCER_EPOCH, True, False, Answer.FENCED),
        (KafkaError._TIMED_OUT, False, False, Answer.TIMED_OUT),
        (KafkaError._MSG_TIMED_OUT, True, False, Answer.REQUIRES_ABORT),
        (KafkaError.REQUEST_TIMED_OUT, False, False, Answer.TIMED_OUT),
        (KafkaError.MSG_SIZE_TOO_LARGE, False, False, Answer.FAILED),
        (KafkaError.INVALID_TXN_STATE, False, False, Answer.FAILED),
        (KafkaError._FATAL, False, False, Answer.FAILED),
    ],
)
def test_the_librarys_codes(
    code: int | None, requires_abort: bool, retried: bool, answer: Answer
) -> None:
    name = None if code is None else KafkaError(code).name()
    assert answer_of(name, requires_abort=requires_abort, retried=retried) is answer
