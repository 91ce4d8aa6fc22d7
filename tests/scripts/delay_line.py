"""One end of a line between two hosts that takes its time: packets of a TUN device go out of one pipe, come by another.

Started once on each host, with the pipes crossed. Usage: delay_line.py DEVICE ADDRESS DELAY_S; standard input and
output are the pipes. Each end holds what comes in until its time has come; nothing is lost and order is kept.
"""

import fcntl
import os
import struct
import subprocess
import sys
import threading
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_HEAD = struct.Struct("!Id")  # length of a packet, time at which it was sent


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)  # the other end is gone
        data += piece
    return data


def _send(tun: int) -> None:
    while True:
        packet = os.read(tun, 65536)
        sys.stdout.buffer.write(_HEAD.pack(len(packet), time.monotonic()) + packet)
        sys.stdout.buffer.flush()


def main() -> None:
    device, address, delay_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "address", "add", f"{address}/24", "dev", device], check=True)
    subprocess.run(["ip", "link", "set", device, "up"], check=True)
    threading.Thread(target=_send, args=(tun,), daemon=True).start()
    while True:
        length, sent = _HEAD.unpack(_read(_HEAD.size))
        packet = _read(length)
        time.sleep(max(0.0, sent + delay_s - time.monotonic()))
        os.write(tun, packet)


if __name__ == "__main__":
    main()
