"""Names the time in which what is written and not synced cannot have been lost.

It ends with the machine's boot, and with the mount of the data folder's file system: one that is
unmounted by force, or after an error made it read-only, drops what it had not written yet.
"""

import os
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id(data: Path, *, sys: Path = Path("/sys")) -> str:
    """Returns the machine's boot id and, if the kernel shows it, the mount of a folder's device.

    The kernel makes ``/sys/fs/<type>/<device>`` anew for each mount of ext4, xfs or f2fs, and gives
    it a number that no other file there had since the boot. The number of a mount itself is used
    again, and differs between containers. Of other file systems only the boot is known. The data
    folder may not exist yet.
    """
    boot = _BOOT_ID.read_text().strip()
    mount = _mount(data, sys)
    return boot if mount is None else f"{boot}/{mount}"


def _mount(data: Path, sys: Path) -> int | None:
    while True:
        try:
            device = data.stat().st_dev
            break
        except FileNotFoundError:
            data = data.absolute().parent
    try:
        name = (sys / f"dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True).name
        for kind in sorted((sys / "fs").iterdir()):
            try:
                return (kind / name).stat().st_ino
            except FileNotFoundError:
                continue
    except OSError:  # no block device, or no sysfs
        pass
    return None
