"""The server process: ``python -m delaywheel_replica.server.main``, started by the supervisor.

SIGTERM: drain and exit with 0. SIGHUP: take over the settings that the supervisor has reread. When
the supervisor ends: exit at once. After a defect on any thread, or in our code that gRPC's threads
or the event loop call outside of requests: exit with 1, so that a node is never half alive; the
supervisor restarts the server.
"""

import asyncio
import os
import signal
import sys
from importlib.metadata import version
from typing import Final

from delaywheel.storage.files.wheel_folder import MetaTooNew
from delaywheel.storage.folder.node_file import NodeFolderError
from delaywheel_replica.config import Config
from delaywheel_replica.link import Link
from delaywheel_replica.peers.network import PeerListenError
from delaywheel_replica.process.defects import end_with_any_thread
from delaywheel_replica.process.descriptors import raise_descriptor_limit
from delaywheel_replica.process.garbage import exit_at_once, keep_modules
from delaywheel_replica.process.inheritance import (
    ADDRESS_VARIABLE,
    EXIT_HOPELESS,
    exit_with_supervisor,
    take_hangups,
)
from delaywheel_replica.process.logs import get_logger, set_level, set_up_logging
from delaywheel_replica.server.access.faults import exposed_ports
from delaywheel_replica.server.access.files import AccessFileError
from delaywheel_replica.server.certificates import CertificateError
from delaywheel_replica.server.intake.descriptors import share_out
from delaywheel_replica.server.listening import ListenError
from delaywheel_replica.server.serving import CallsEndedError, NodeIdTakenError, Server

# The default of 5 ms shows in the latency of single messages: writer and loop switch often.
_SWITCH_INTERVAL_S: Final = 0.0005

_log = get_logger(__name__)


def main() -> int:
    """Runs the server of one node; returns the process's exit code."""
    keep_modules()
    exit_with_supervisor()
    config = Config.inherited()
    set_up_logging(
        "server",
        node=config.node_id,
        cluster=config.cluster_id,
        log_format=config.log_format,
        level=config.log_level,
    )
    _log.info(
        "server starts",
        version=version("delaywheel"),
        data_dir=str(config.data_dir),
        settings=config.shown_changes(),
    )
    for port in exposed_ports(config):
        _log.warning(
            f"insecure: whoever reaches it may {port.allows}",
            address=port.address,
            without=" and ".join(port.lacks),
        )
    if config.unchecked:
        _log.warning(config.unchecked)
    end_with_any_thread()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Ctrl-C is handled by the supervisor, which ends its children in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(_serve(config))
    except (NodeFolderError, MetaTooNew) as error:
        _log.error("cannot start", error=str(error))
        return EXIT_HOPELESS
    except (AccessFileError, CertificateError, ListenError, PeerListenError) as error:
        _log.error("cannot start", error=str(error))
        # After a restart, the previous process may still hold the port while it ends; and a file
        # that was in order when the node started may be in the middle of being replaced.
        return 1 if ADDRESS_VARIABLE in os.environ else EXIT_HOPELESS
    return 0


async def _serve(config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGHUP, config.take_reloaded, set_level)
    take_hangups()
    descriptors = share_out(raise_descriptor_limit(), open_files=config.open_files)
    _log.info("descriptors", connections=descriptors.connections, files=descriptors.slot_files)
    server = Server(config, Link.inherited(), descriptors)
    try:
        await server.run(stop)
    except (CallsEndedError, NodeIdTakenError) as error:
        _log.error("ends at once", error=str(error))
        exit_at_once(EXIT_HOPELESS if isinstance(error, NodeIdTakenError) else 1)


if __name__ == "__main__":
    exit_at_once(main())
