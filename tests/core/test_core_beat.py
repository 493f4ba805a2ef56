import json

import pytest
from hypothesis import given

from delaywheel.identity import WheelId
from delaywheel_replica.core.beat import SERVER_FRESH_MS, Beat, CleanerStatus, ServerStatus
from delaywheel_replica.core.fields import MalformedError
from support.core_values import beats, cleaner_statuses, server_statuses


@given(beats)
def test_a_beat_survives_json(beat: Beat) -> None:
    assert Beat.from_json(json.loads(json.dumps(beat.to_json()))) == beat
    assert set(beat.named) == {beat.open, beat.spare} - {None}


@given(server_statuses)
def test_a_servers_row_survives_json(status: ServerStatus) -> None:
    assert ServerStatus.from_json(json.loads(json.dumps(status.to_json()))) == status
    assert status.is_fresh(status.monotonic_ms + SERVER_FRESH_MS - 1)
    assert not status.is_fresh(status.monotonic_ms + SERVER_FRESH_MS)


@given(cleaner_statuses)
def test_a_cleaners_row_survives_json(status: CleanerStatus) -> None:
    assert CleanerStatus.from_json(json.loads(json.dumps(status.to_json()))) == status
    assert status.floor == (status.progress.floor if status.progress else None)


@given(cleaner_statuses, server_statuses)
def test_a_row_that_lacks_a_field_or_has_a_wrong_one_is_named(
    cleaner: CleanerStatus, server: ServerStatus
) -> None:
    for read, document in (
        (CleanerStatus.from_json, cleaner.to_json()),
        (ServerStatus.from_json, server.to_json()),
    ):
        for name in document:
            lacking = {key: value for key, value in document.items() if key != name}
            with pytest.raises(MalformedError, match=f"{name} is missing"):
                read(lacking)
            with pytest.raises(MalformedError):
                read({**document, name: object()})


@pytest.mark.parametrize("document", [None, [], "x", 3])
def test_no_object(document: object) -> None:
    with pytest.raises(MalformedError, match="an object was expected"):
        Beat.from_json(document)


def test_a_wheel_id_that_is_none_is_named() -> None:
    document = Beat("a", "s", "b", 0, WheelId("a", 1), None, 1, False, True).to_json()  # noqa: FBT003
    with pytest.raises(MalformedError, match="wheel"):
        Beat.from_json({**document, "open": "a.0"})
