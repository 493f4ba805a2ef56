"""A refused reader is reported while it is refused, and no longer."""

from __future__ import annotations

import threading
import time
from typing import ClassVar
from unittest.mock import patch

import pytest

from delaywheel_replica.cleaner.ingress.term import FAULT_KEPT_S
from delaywheel_replica.cleaner.kafka import ingress_thread
from delaywheel_replica.cleaner.kafka.ingress_thread import RENEW_S, IngressThread
from delaywheel_replica.cleaner.outside.ports import KafkaAway
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from support.cleaner.ingress_site import Site
from support.due.wheels import Wheels

PATIENCE_S = 60


def test_a_fault_that_is_over_is_no_longer_reported_even_without_records(wheels: Wheels) -> None:
    site = Site(wheels)
    site.topics.make()
    site.topics.refuses = "denied"
    site.take_in()
    site.pass_ms(round(FAULT_KEPT_S * 1000) - 1_000)
    site.take_in()  # said again
    site.topics.refuses = None
    site.pass_ms(round(FAULT_KEPT_S * 1000) - 1)
    site.take_in()
    (_,) = site.ingress.faults
    site.pass_ms(1)
    site.take_in()
    assert not site.ingress.faults
    site.close()


class Refused:
    """A reader that reports only once why it cannot read."""

    made = 0
    cut_off: ClassVar[dict[object, int]] = {}

    def __init__(self, _: object) -> None:
        type(self).made += 1
        self._is_reported = False

    def poll(self, _most: int, _wait_s: float) -> list[object]:
        time.sleep(0.001)
        if not self._is_reported:
            self._is_reported = True
            raise KafkaAway("denied")
        return []

    def assign(self, *_: object) -> None: ...

    def go_back(self, _: object) -> None: ...

    def pause_only(self, _: object) -> None: ...

    def report_to_group(self, *_: object) -> None: ...

    def lags(self) -> dict[object, int]:
        return {}

    def open_transactions(self) -> frozenset[object]:
        return frozenset()

    def close(self) -> None: ...


def test_a_refusal_that_lasts_is_reported_again() -> None:
    assert RENEW_S + 10 < FAULT_KEPT_S
    woken = threading.Semaphore(0)
    settings = KafkaSettings(KafkaNames("c"), {"bootstrap.servers": "127.0.0.1:1"})
    with (
        patch.object(ingress_thread, "IngressReader", Refused),
        patch.object(ingress_thread, "RENEW_S", 0.01),
        patch.object(ingress_thread, "FAULT_PAUSE_S", 0.01),
    ):
        reader = IngressThread(settings, lambda _: {}, woken.release)
        reader.assign({("in", 0): 0})
        for _ in range(3):
            assert woken.acquire(timeout=PATIENCE_S)
            with pytest.raises(KafkaAway, match="denied"):
                reader.poll()
        assert Refused.made >= 3
        reader.close()
        reader._thread.join(PATIENCE_S)
