"""Entry point of a server process; started by :class:`lightning_g2.transport.process.ServerProcess`, not by hand."""

import json
import os
import sys
import threading

from lightning_g2.transport.process import ServerAddress
from lightning_g2.transport.serving import serve


def _end_with_parent() -> None:
    """End when the lifeline brings a byte or closes."""
    os.read(sys.stdin.fileno(), 1)  # unbuffered: a lock held in a buffer would upset the interpreter's exit
    os._exit(0)  # RPC threads may be deep in a call; nothing here needs unwinding


def main() -> None:
    """Read the address from standard input, join the session and serve until standard input closes."""
    order = json.loads(sys.stdin.buffer.readline())
    sys.path.extend(path for path in order["path"] if path not in sys.path)
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    serve(ServerAddress(**order["address"]))
    threading.Event().wait()


if __name__ == "__main__":
    main()
