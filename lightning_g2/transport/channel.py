"""A Unix socket between a rank and a server of one host, for the small calls of every step.

A call over RPC takes about a millisecond, most of it in threads that wake each other; over a socket that one thread of
the server listens to it takes a twentieth of that. The socket has an abstract name, so that no file is left behind
however the processes end, and it is gone when they are.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from lightning_g2.errors import TransportError
from lightning_g2.transport.failed import Failed

Settle = Callable[[Any], None]
"""Takes the answer to one call, or the error it ended with; called once, at once or later, from any thread."""

Answer = Callable[[str, tuple[Any, ...], Settle], None]
"""Answers a call: its name, its arguments, and what takes the answer."""

_UCRED = struct.Struct("3i")  # pid, uid, gid of a peer, as SO_PEERCRED gives them
_BACKLOG = 1024


class ChannelServer:
    """The server's end: one thread for each rank.

    Args:
        name: name of the socket.
        secret: what a rank must prove to know before anything else is read.
        answer: answers a call.
    """

    def __init__(self, name: str, secret: bytes, answer: Answer) -> None:
        self._name = name
        self._secret = secret
        self._answer = answer

    def start(self) -> None:
        """Listen; the threads live as long as the process."""
        listener = Listener(_abstract(self._name), "AF_UNIX", backlog=_BACKLOG)
        threading.Thread(target=self._accept, args=(listener,), name="channel", daemon=True).start()

    def _accept(self, listener: Listener) -> None:
        while True:
            connection = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="channel of a rank", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError, AuthenticationError):  # the rank has left
            if _peer_user(connection) != os.getuid():
                return
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            sending = threading.Lock()
            while True:
                number, name, arguments = pickle.loads(connection.recv_bytes())
                self._answer(name, arguments, _settle(connection, sending, number))


def _settle(connection: Connection, sending: threading.Lock, number: int) -> Settle:
    def settle(reply: Any) -> None:
        message = pickle.dumps((number, Failed.of(reply) if isinstance(reply, Exception) else reply))
        with sending, suppress(OSError):  # whoever asked may have left meanwhile
            connection.send_bytes(message)

    return settle


class Channel:
    """A rank's end. Several calls may be under way; their answers may come in any order.

    Several threads may ask at once: whichever waits first receives for all.

    Args:
        name: name of the server's socket.
        secret: see :class:`ChannelServer`.
    """

    def __init__(self, name: str, secret: bytes) -> None:
        self._name = name
        self._secret = secret
        self._connection: Connection | None = None
        self._asked = 0
        self._asking = threading.RLock()
        self._turn = threading.Condition()  # guards the two below
        self._receiving = False
        self._arrived: dict[int, Any] = {}

    def connect(self) -> None:
        """Connect to the server.

        Raises:
            TransportError: there is no such server on this host.
        """
        try:
            self._connection = Client(_abstract(self._name), "AF_UNIX", authkey=self._secret)
        except (OSError, EOFError, AuthenticationError) as error:
            raise TransportError(
                f"shared memory: the server's socket {self._name!r} cannot be reached ({error}); rank and server must "
                "run on one host, as one user and in one network namespace, or use transport='rpc'"
            ) from error

    def ask(self, name: str, *arguments: Any) -> int:
        """Send a call; returns its number."""
        with self._asking:
            self._asked += 1
            self._open().send_bytes(pickle.dumps((self._asked, name, arguments)))
            return self._asked

    def arrived(self, number: int) -> bool:
        """Whether the answer to a call is here."""
        while self._begins_to_receive(number, 0.0):
            if not self._received(0.0):
                break
        return number in self._arrived

    def answer(self, number: int, *, timeout_s: float | None) -> Any:
        """Wait for the answer to a call.

        Raises:
            EOFError, OSError: the server is gone.
            TimeoutError: it has not answered in time.
        """
        while self._begins_to_receive(number, timeout_s):
            if not self._received(timeout_s):
                break
        if number not in self._arrived:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        return self._arrived.pop(number)

    def close(self) -> None:
        """Close the connection; may be called any number of times."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _begins_to_receive(self, number: int, timeout_s: float | None) -> bool:
        """Wait while another thread receives; whether this one has to, since the answer is not here yet."""
        with self._turn:
            self._turn.wait_for(lambda: number in self._arrived or not self._receiving, timeout_s)
            if number in self._arrived or self._receiving:
                return False
            self._receiving = True
            return True

    def _received(self, timeout_s: float | None) -> bool:
        """Take the next answer in, whosever it is; False where none has come in time."""
        try:
            if not self._open().poll(timeout_s):
                return False
            try:
                number, reply = pickle.loads(self._open().recv_bytes())
            except BaseException:
                self.close()  # interrupted within a message, what follows could not be told apart
                raise
            self._arrived[number] = reply
            return True
        finally:
            with self._turn:
                self._receiving = False
                self._turn.notify_all()

    def _open(self) -> Connection:
        if self._connection is None:
            raise EOFError("the connection is closed")
        return self._connection


def _abstract(name: str) -> str:
    return "\0" + name


def _peer_user(connection: Connection) -> int:
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        return int(_UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])
