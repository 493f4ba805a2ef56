"""Two processes that claim to be the same node; real sockets over loopback."""

import pytest

from delaywheel_replica.core.protocol.messages import Vote
from delaywheel_replica.peers.states import Connection, PeerReason
from local.loopback.kafka import free_ports
from support.peers.site import Site, free_members, identity


@pytest.mark.parametrize("boot", ["elsewhere", "boot"])
def test_a_copied_folder_never_takes_the_place_of_the_first(boot: str) -> None:
    """Two nodes with one storage would keep replacing each other's streams."""
    members = free_members()
    elsewhere = members | {"n2": f"127.0.0.1:{free_ports(1)[0]}"}
    with Site(identity("n1"), members) as one, Site(identity("n2"), members) as first:
        one.wait_connected("n2")
        first.wait_connected("n1")
        with Site(identity("n2", boot=boot), elsewhere) as second:
            second.wait_refused("n1", PeerReason.NODE_ID_TAKEN)
            second.wait("it has to go", second.network.has_twin)
            one.network.send("n2", Vote(1))
            first.wait("heard", lambda: first.came)
            assert one.state("n2").connection is Connection.CONNECTED
            assert not one.broken
            assert not first.broken
            assert not first.network.has_twin()
            assert not one.network.has_twin()


def test_a_twin_of_this_node_is_refused() -> None:
    members = free_members()
    twin = {"n1": members["n2"], "n2": members["n1"]}
    with (
        Site(identity("n1"), members) as one,
        Site(identity("n1", storage="twin"), twin) as other,
    ):
        other.wait_refused("n2", PeerReason.NODE_ID_TAKEN)
        one.wait_refused("n2", PeerReason.NODE_ID_TAKEN)
