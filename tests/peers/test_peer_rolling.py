"""Nodes with partly changed settings; real sockets over loopback."""

from __future__ import annotations

from functools import partial

from delaywheel_replica.core.protocol.messages import Vote
from delaywheel_replica.peers.states import PeerReason
from local.loopback.kafka import free_ports
from support.peers.site import SETTINGS, Site, free_members, identity


def test_members_that_are_changed_node_by_node_go_on_talking() -> None:
    """A third node is added: n1 already knows it, n2 does not."""
    members = free_members(3)
    new = SETTINGS | {"members": "n1,n2,n3"}
    old_members = {node: members[node] for node in ("n1", "n2")}
    with (
        Site(identity("n1", settings=new), members) as one,
        Site(identity("n3", settings=new), members) as three,
    ):
        with Site(identity("n2"), old_members) as two:
            one.wait_connected("n2", "n3")
            two.wait_connected("n1")
            three.wait_refused("n2", PeerReason.NOT_A_MEMBER)
            reported = "members is n1,n2,n3 at n1, n1,n2 at n2"
            assert one.state("n2").rolling == two.state("n1").rolling == reported
            one.network.send("n2", Vote(1))
            two.wait_for_messages(1)
        one.wait("it is gone", lambda: "n2" in one.broken)
        with Site(identity("n2", settings=new), members) as two:
            for site, others in ((one, ("n2", "n3")), (two, ("n1", "n3")), (three, ("n1", "n2"))):
                site.wait_connected(*others)
                assert [site.state(peer).rolling for peer in others] == [None, None]


def test_a_format_is_rolled_out_by_the_release_that_reads_it_and_then_by_the_one_that_writes() -> (
    None
):
    """n1 stays; n2 reads the next format, then writes it, then has a release too late for n1."""
    ports = free_ports(2)
    members = {f"n{n}": f"127.0.0.1:{port}" for n, port in enumerate(ports, start=1)}
    own = identity("n1", format=1, reads_from=1, reads_to=2)
    with Site(own, members) as one:
        for life, written in enumerate((1, 2), start=1):
            reported = identity("n2", format=written, reads_from=1, reads_to=2)
            with Site(reported, members) as two:
                one.wait_connected("n2")
                two.wait_connected("n1")
                one.network.send("n2", Vote(life))
                two.wait_for_messages(1)
                differ = "format is 1 at n1, 2 at n2" if written == 2 else None
                assert one.state("n2").rolling == two.state("n1").rolling == differ
            one.wait("it is gone", partial(_has_broken, one, life))
        with Site(identity("n2", format=3, reads_from=2, reads_to=3), members) as two:
            one.wait_refused("n2", PeerReason.WRONG_FORMAT)
            two.wait_refused("n1", PeerReason.WRONG_FORMAT)


def _has_broken(site: Site, times: int) -> bool:
    return len(site.broken) >= times
