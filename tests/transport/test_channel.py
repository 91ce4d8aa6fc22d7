"""The socket between a rank and a server of one host."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from lightning_g2.errors import G2Error, ProtocolError, TransportError
from lightning_g2.transport.channel import Channel, ChannelServer
from lightning_g2.transport.failed import Failed

_numbers = itertools.count()


def _serve(answer: Callable[..., None]) -> str:
    name = f"lightning-g2-test-{time.monotonic_ns()}-{next(_numbers)}"
    ChannelServer(name, b"secret", answer).start()
    return name


def _connect(name: str, secret: bytes = b"secret") -> Channel:
    channel = Channel(name, secret)
    channel.connect()
    return channel


def test_answers_may_come_later_and_in_any_order() -> None:
    held: list[Callable[[object], None]] = []
    asked = threading.Event()

    def answer(name: str, arguments: tuple[object, ...], settle: Callable[[object], None]) -> None:
        if name == "hold":
            held.append(settle)
            asked.set()
        else:
            settle((name, arguments))

    channel = _connect(_serve(answer))
    first = channel.ask("hold")
    assert asked.wait(60)
    second = channel.ask("echo", 1, "two")
    assert channel.answer(second, timeout_s=60) == ("echo", (1, "two"))
    assert not channel.arrived(first)
    held[0]("at last")
    assert channel.answer(first, timeout_s=60) == "at last"
    channel.close()
    channel.close()


def test_ranks_do_not_wait_for_each_other() -> None:
    held: list[Callable[[object], None]] = []
    asked = threading.Event()

    def answer(name: str, _: object, settle: Callable[[object], None]) -> None:
        if name == "hold":
            held.append(settle)
            asked.set()
        else:
            settle(name)

    name = _serve(answer)
    one, other = _connect(name), _connect(name)
    waiting = one.ask("hold")
    assert asked.wait(60)
    assert other.answer(other.ask("now"), timeout_s=60) == "now"
    held[0](1)
    assert one.answer(waiting, timeout_s=60) == 1


def test_several_threads_wait_at_one_end() -> None:
    """The one that has asked first receives for the others while its own answer is held back."""
    held: list[Callable[[object], None]] = []
    asked, answered = threading.Event(), threading.Semaphore(0)

    def answer(name: str, arguments: tuple[object, ...], settle: Callable[[object], None]) -> None:
        if name == "hold":
            held.append(settle)
            asked.set()
        else:
            settle(arguments[0])

    channel = _connect(_serve(answer))
    results: dict[object, object] = {}

    def ask(name: str, value: int) -> None:
        results[value] = channel.answer(channel.ask(name, value), timeout_s=60)
        answered.release()

    first = threading.Thread(target=ask, args=("hold", 0))
    first.start()
    assert asked.wait(60)
    others = [threading.Thread(target=ask, args=("echo", value)) for value in range(1, 9)]
    for thread in others:
        thread.start()
    for _ in others:
        assert answered.acquire(timeout=60)
    assert first.is_alive()
    held[0]("at last")
    for thread in (first, *others):
        thread.join(60)
    assert results == {0: "at last", **{value: value for value in range(1, 9)}}


def test_errors_keep_their_type_and_those_of_others_their_name() -> None:
    def answer(name: str, _: object, settle: Callable[[object], None]) -> None:
        settle(ProtocolError("not so") if name == "ours" else KeyError("x"))

    channel = _connect(_serve(answer))
    ours, theirs = (channel.answer(channel.ask(name), timeout_s=60) for name in ("ours", "theirs"))
    assert isinstance(ours, Failed)
    assert isinstance(ours.raised(), ProtocolError)
    assert type(theirs.raised()) is G2Error
    assert str(theirs.raised()) == "the server failed with KeyError: 'x'"


def test_whoever_does_not_know_the_secret_is_not_read() -> None:
    read: list[object] = []
    name = _serve(lambda *call: read.append(call))
    with pytest.raises(TransportError, match="cannot be reached"):
        _connect(name, b"guessed")
    assert read == []


def test_no_server_of_that_name() -> None:
    with pytest.raises(TransportError, match="must run on one host, as one user and in one network namespace"):
        _connect("lightning-g2-of-nobody")


def test_an_answer_that_does_not_come_in_time() -> None:
    channel = _connect(_serve(lambda *_: None))
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        channel.answer(channel.ask("nothing"), timeout_s=0.01)
    channel.close()
    with pytest.raises(EOFError, match="closed"):
        channel.ask("more")
