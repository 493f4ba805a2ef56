"""`delaywheel tail`: messages as they appear in their topics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Unpack

from confluent_kafka import Consumer, KafkaException

from delaywheel_replica.cli.asking.kafka import KafkaOptions, kafka_access, settings_failure
from delaywheel_replica.cli.doing.kafka.reading import TopicRecords
from delaywheel_replica.cli.failures import ExitCode
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing import records as printing
from delaywheel_replica.cli.printing.tables import print_ndjson
from delaywheel_replica.cli.printing.text import note, say


def tail(
    topics: Sequence[str],
    *,
    from_beginning: bool,
    last: int | None,
    count: int | None,
    until_end: bool,
    as_json: bool,
    **where: Unpack[KafkaOptions],
) -> int:
    """Prints messages until it is interrupted, has printed `count`, or is at the end."""
    if from_beginning and last is not None:
        raise usage("give --from-beginning or --last, not both")
    if until_end and last is None and not from_beginning:
        raise usage("--until-end needs --from-beginning or --last")
    client = kafka_access(where).client
    try:
        consumer = Consumer(
            {
                "client.id": "delaywheel-tail",
                "log_level": 0,
                "queued.max.messages.kbytes": 16_384,
                "fetch.wait.max.ms": 100,
                **client,
                "group.id": "delaywheel-tail",  # the client wants one; none is joined
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "allow.auto.create.topics": False,
            }
        )
    except KafkaException as exception:
        raise settings_failure(exception) from exception
    records = TopicRecords(consumer, dict.fromkeys(topics), timeout_s=where["timeout_s"])
    try:
        shown = records.read(from_beginning=from_beginning, last=last, until_end=until_end)
        if not (from_beginning or last):
            note(f"waiting for messages in {', '.join(topics)} (Ctrl-C ends)")
        for record in islice(shown, count):
            if as_json:
                print_ndjson([printing.shape(record)])
            else:
                say(printing.line(record))
    except KeyboardInterrupt:
        return ExitCode.DONE
    finally:
        consumer.close()
    return ExitCode.DONE
