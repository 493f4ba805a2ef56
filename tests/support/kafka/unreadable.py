"""A record with a header whose name is not UTF-8, as clients of other languages can send it.

Python's client cannot: this calls the library below it.
"""

import ctypes
from pathlib import Path

import confluent_kafka


def send_unreadable(bootstrap: str, topic: str) -> None:
    """A record to partition 0 with the value `v` and such a header."""
    folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    library = ctypes.CDLL(str(next(folder.glob("librdkafka-*"))))
    for made in (library.rd_kafka_conf_new, library.rd_kafka_new):
        made.restype = ctypes.c_void_p
    why = ctypes.create_string_buffer(200)
    settings = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(settings, b"bootstrap.servers", bootstrap.encode(), why, 200)
    producer = ctypes.c_void_p(library.rd_kafka_new(0, settings, why, 200))
    name, content = ctypes.c_char_p(b"\xff\xfe"), ctypes.c_char_p(b"v")
    end, to_topic, to_partition, value, header = 0, 1, 3, 4, 9
    assert not library.rd_kafka_producev(
        producer,
        *(to_topic, ctypes.c_char_p(topic.encode())),
        *(to_partition, ctypes.c_int32(0)),
        *(value, content, ctypes.c_size_t(1)),
        *(header, name, content, ctypes.c_ssize_t(1)),
        end,
    )
    assert not library.rd_kafka_flush(producer, 60_000)
    library.rd_kafka_destroy(producer)
