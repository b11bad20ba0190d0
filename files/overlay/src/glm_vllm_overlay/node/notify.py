"""systemd's notification protocol (sd_notify), without its library."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*lines: str) -> None:
    """Send lines such as `READY=1` or `STATUS=loading` to the service manager; nothing happens outside a unit."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    # A manager that is being re-executed misses a message; the next one tells it the same.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto("\n".join(lines).encode(), address)
