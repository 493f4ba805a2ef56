from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel.storage.frames.columns import Columns
from support.wheels.messages import (
    Message,
    any_messages,
    columns_of,
    message,
    messages_of,
    names_of,
)


@settings(deadline=None)
@given(st.lists(any_messages(max_size=6), min_size=1, max_size=4))
def test_concat_keeps_every_message_in_order(parts: list[list[Message]]) -> None:
    joined = Columns.concat([columns_of(part) for part in parts])
    assert messages_of(joined) == [each for part in parts for each in part]
    assert len(set(joined.topics)) == len(joined.topics)


@settings(deadline=None)
@given(any_messages(), st.randoms(use_true_random=False))
def test_take_gathers_any_rows(messages: list[Message], chance: Random) -> None:
    rows = chance.choices(range(len(messages)), k=chance.randrange(2 * len(messages)))
    taken = columns_of(messages).take(np.array(rows, dtype=np.intp))
    assert messages_of(taken) == [messages[row] for row in rows]
    assert len(taken.blob) == int(taken.lengths_bytes.sum())


@settings(deadline=None)
@given(any_messages(), st.randoms(use_true_random=False))
def test_compacting_drops_what_no_message_has(messages: list[Message], chance: Random) -> None:
    rows = chance.sample(range(len(messages)), k=chance.randrange(len(messages) + 1))
    taken = columns_of(messages).take(np.array(rows, dtype=np.intp))
    compacted = taken.compacted()
    assert messages_of(compacted) == messages_of(taken)
    assert set(compacted.topics) == {messages[row].topic for row in rows}


def test_concat_of_names_and_nothing() -> None:
    names = names_of(columns_of([message(5)]))
    both = Columns.concat([names, names])
    assert both.due_ms.tolist() == [names.due_ms[0]] * 2
    assert both.topics == names.topics
    assert len(Columns.concat([])) == 0
