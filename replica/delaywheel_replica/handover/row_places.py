"""Where the status files of a node's two processes are.

The server's is in memory: the thread that writes it, ten times a second and after each
acknowledgement, must not wait for a hanging disk. The cleaner's is in the data folder: its progress
and floor are useful after the node has ended.
"""

from pathlib import Path

from delaywheel.storage.folder.status_file import in_memory
from delaywheel_replica.process.inheritance import server_row_fd


def server_row_path(data: Path) -> Path:
    """Returns the path of the server's row."""
    descriptor = server_row_fd()
    return data / "server.row" if descriptor is None else in_memory(descriptor)
