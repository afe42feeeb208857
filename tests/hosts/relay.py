"""Latency and loss of a link, for kernels without netem: frames between two network interfaces are
passed on later, or not at all.

    python relay.py PORT OTHER DELAY_S LOSS   until one is gone
    python relay.py PORT                      turns off the offload of checksums of a port, which
                                              frames that leave a veth would lack
"""

import ctypes
import fcntl
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress

SIOCETHTOOL = 0x8946
ETHTOOL_SET_TX_CHECKSUM = 0x17
ALL_PROTOCOLS = socket.htons(3)
FRAME_BYTES = 65536


def turn_off_checksum_offload(port):
    """Let the kernel compute checksums of frames that leave a port, and cut them to its MTU."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_SET_TX_CHECKSUM, 0))
    request = struct.pack("16sP16x", port.encode(), ctypes.addressof(value))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def open_port(name):
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, ALL_PROTOCOLS)
    port.bind((name, 0))
    port.setblocking(False)
    return port


def relay(names, delay_s, loss):
    """Pass on frames from each of two ports to the other.

    Args:
        delay_s: Seconds that each frame takes longer.
        loss: Fraction of frames that are lost.
    """
    first, second = map(open_port, names)
    others = {first: second, second: first}
    rng = random.Random(0)
    late = deque()  # (time, port, frame)
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for port in select.select([first, second], [], [], wait_s)[0]:
            frame, address = port.recvfrom(FRAME_BYTES)
            if address[2] != socket.PACKET_OUTGOING and rng.random() >= loss:
                late.append((time.monotonic() + delay_s, others[port], frame))
        while late and late[0][0] <= time.monotonic():
            _, port, frame = late.popleft()
            port.send(frame)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        turn_off_checksum_offload(sys.argv[1])
    else:
        with suppress(OSError):  # a port is gone
            relay(sys.argv[1:3], *map(float, sys.argv[3:]))
