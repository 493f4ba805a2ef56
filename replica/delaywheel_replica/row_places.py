"""Where the rows lie through which a node's two processes report their status.

The server's lies in memory: ten times a second, and whenever something is acknowledged, a thread
writes it that must not wait for a hanging disk. The cleaner's lies in the data folder: its progress
and floor are of use after the node has ended.
"""

from pathlib import Path

from delaywheel.storage.folder.status_file import in_memory
from delaywheel_replica.process.inheritance import server_row_fd


def server_row_path(data: Path) -> Path:
    """Returns the path of the server's row."""
    descriptor = server_row_fd()
    return data / "server.row" if descriptor is None else in_memory(descriptor)
