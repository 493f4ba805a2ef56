"""Dead letters at hand: list them, send them again exactly once, or mark them as dealt with.

    from delaywheel.deadletters import DeadLetterTopic, Selection

    with DeadLetterTopic("delaywheel-main-dead", {"bootstrap.servers": "127.0.0.1:9092"}) as topic:
        print(topic.count(Selection(reason="TOPIC_MISSING")))
        print(topic.replay(Selection(reason="TOPIC_MISSING", topic="orders")))

It needs the extra `deadletters` (confluent-kafka). `marks.py` says how a letter is replayed once.
The modules that decide (`letter`, `selection`, `marks`, `counting`) know no Kafka.
"""

try:
    import confluent_kafka as _  # noqa: F401  only to check that it is installed
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "delaywheel.deadletters needs confluent-kafka: install delaywheel[deadletters]"
    ) from missing

from delaywheel.deadletters.counting import Count, LetterCounts, Settled
from delaywheel.deadletters.errors import DeadLettersError, DeadLettersReason
from delaywheel.deadletters.handling.aio import AsyncDeadLetterConsumer, AsyncLetterHandler
from delaywheel.deadletters.handling.consumer import DeadLetterConsumer, LetterHandler
from delaywheel.deadletters.handling.figures import LetterFigures
from delaywheel.deadletters.letter import Letter, LetterPlace
from delaywheel.deadletters.marks import LetterState, Mark
from delaywheel.deadletters.selection import Selection
from delaywheel.deadletters.settling import DROP, KEEP, REPLAY, Decision, Drop, Keep, Replay
from delaywheel.deadletters.topic import DeadLetterTopic, dead_letter_topic, undecided_topic

__all__ = [
    "DROP",
    "KEEP",
    "REPLAY",
    "AsyncDeadLetterConsumer",
    "AsyncLetterHandler",
    "Count",
    "DeadLetterConsumer",
    "DeadLetterTopic",
    "DeadLettersError",
    "DeadLettersReason",
    "Decision",
    "Drop",
    "Keep",
    "Letter",
    "LetterCounts",
    "LetterFigures",
    "LetterHandler",
    "LetterPlace",
    "LetterState",
    "Mark",
    "Replay",
    "Selection",
    "Settled",
    "dead_letter_topic",
    "undecided_topic",
]
