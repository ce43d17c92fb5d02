"""A wire that is late or loses frames: two TAP devices, and a program that carries frames from one to the other.

The kernel's own way is `tc ... netem`, which some kernels are built without. What leaves the node is held back or
dropped; what comes to it is handed over at once.

    python wire.py NODE_END SWITCH_END DELAY_S LOSS     makes both devices, prints "ready", carries until it is killed
"""

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65536


def open_tap(name: str) -> int:
    """Make a TAP device in this network namespace; return the descriptor of its frames."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def carry(node: int, switch: int, delay_s: float, loss: float) -> None:
    """Carry frames between two TAP devices, until the process is killed.

    Args:
        node, switch: descriptors of the two ends.
        delay_s: seconds for which each frame from the node is held back.
        loss: the share of frames from the node that are dropped, 0 to 1. The same ones in every run of as many frames.
    """
    dice = random.Random(0)
    late: deque[tuple[float, bytes]] = deque()  # when each frame is due
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([node, switch], [], [], wait_s)
        if switch in ready:
            with suppress(OSError):  # an end that is down takes nothing
                os.write(node, os.read(switch, _FRAME_BYTES))
        if node in ready:
            frame = os.read(node, _FRAME_BYTES)
            if dice.random() >= loss:
                late.append((time.monotonic() + delay_s, frame))
        while late and late[0][0] <= time.monotonic():
            with suppress(OSError):
                os.write(switch, late.popleft()[1])


if __name__ == "__main__":
    ends = [open_tap(name) for name in sys.argv[1:3]]
    print("ready", flush=True)
    carry(*ends, *map(float, sys.argv[3:]))
