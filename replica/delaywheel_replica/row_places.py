"""Where the rows lie in which the two processes of a node tell each other how they stand.

The server's lies in memory: ten times a second, and whenever something is acknowledged, a thread
writes it that must not wait for a disk which hangs. The cleaner's lies in the data folder: what it
tells of progress and floor is of use after the node has ended.
"""

from pathlib import Path

from delaywheel.storage.folder.status_file import in_memory
from delaywheel_replica.process.inheritance import server_row_fd


def server_row_path(data: Path) -> Path:
    """What the server writes."""
    descriptor = server_row_fd()
    return data / "server.row" if descriptor is None else in_memory(descriptor)
