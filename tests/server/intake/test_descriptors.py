import pytest

from delaywheel_replica.server.intake.descriptors import Descriptors, share_out


@pytest.mark.parametrize("limit", [256, 1_024, 4_096, 8_704, 65_536, 1 << 20])
def test_callers_never_take_what_the_wheel_needs(limit: int) -> None:
    shares = share_out(limit)
    reserve = limit - shares.connections - shares.slot_files
    assert reserve >= min(limit // 4, 1_024)
    assert shares.connections >= limit // 8 or shares.connections == 4_096
    assert shares.slot_files >= limit // 4 or shares.slot_files == 8_192


def test_a_limit_that_held_no_connections_beside_the_slot_files() -> None:
    assert share_out(8_704) == Descriptors(connections=1_920, slot_files=5_760)


def test_two_ports_have_no_more_connections_than_one() -> None:
    """gRPC's bound is that of a port: with a port for tokens, callers had twice their share."""
    shares = Descriptors(connections=187, slot_files=563)
    assert shares.connections_of_port(1) == 187
    assert 2 * shares.connections_of_port(2) <= 187


def test_slot_files_that_an_operator_set_leave_the_rest_to_connections() -> None:
    assert share_out(1_024, open_files=700) == Descriptors(connections=68, slot_files=700)
