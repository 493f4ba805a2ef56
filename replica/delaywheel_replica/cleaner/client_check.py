"""Whether the Kafka client library takes the operator's settings."""

from __future__ import annotations

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from delaywheel_replica.cleaner.settings import KafkaSettings


def refused_by_client(settings: KafkaSettings) -> str | None:
    """What the client library says against the operator's settings; None: nothing.

    Only it knows all names, values and what must go together, and that differs from one kind of
    client to the next: so one of each kind is made, as it will run. Nothing is asked of Kafka.
    """
    quiet = {"log_level": 0}
    try:
        AdminClient({**settings.admin(), **quiet})
        Consumer({**settings.consumer(), **quiet}).close()
        Producer({**settings.producer(settings.names.leader_id(0)), **quiet})
    except KafkaException as exception:
        return str(exception.args[0].str())
    except (TypeError, ValueError) as error:
        return str(error)  # what would have to be a function, among others
    return settings.misfit()
