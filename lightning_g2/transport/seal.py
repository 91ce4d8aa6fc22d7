"""Messages of RPC that prove the job's secret before anything in them is read.

RPC runs what it is sent: a message is a pickle of a function and its arguments. So each pickle goes out behind a keyed
hash of it, and one that does not match is refused unread. What the seal does not cover is said in SECURITY.md: tensors,
which travel beside the pickle and run nothing, and RPC's own messages in C++.
"""

from __future__ import annotations

import hashlib
import hmac
from importlib import import_module
from typing import Any

from lightning_g2.errors import ProtocolError

# Not imported by name: what of them torch declares to be public differs with the order in which types are checked.
api: Any = import_module("torch.distributed.rpc.api")
internal: Any = import_module("torch.distributed.rpc.internal")

_SIZE = hashlib.sha256().digest_size
_RPCS_OWN = internal._internal_rpc_pickler


class SealedPickler(internal._InternalRPCPickler):  # type: ignore[misc]
    """RPC's pickler, with a seal on each message.

    Args:
        secret: what the members of a session know, and nobody else.
    """

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self._secret = secret

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        """The sealed pickle, and the tensors beside it."""
        data, tensors = super().serialize(obj)
        return self._seal(data) + data, tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[Any]) -> Any:
        """What a sealed pickle holds.

        Raises:
            ProtocolError: the seal is not this session's.
        """
        seal, data = binary_data[:_SIZE], binary_data[_SIZE:]
        if not hmac.compare_digest(seal, self._seal(data)):
            raise ProtocolError("a message of RPC without the seal of this job was refused unread")
        return super().deserialize(data, tensor_table)

    def _seal(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, "sha256")


def seal_rpc(secret: bytes) -> None:
    """From now on this process sends sealed messages only, and reads no others."""
    internal._internal_rpc_pickler = api._default_pickler = SealedPickler(secret)


def unseal_rpc() -> None:
    """Give RPC its own pickler back."""
    internal._internal_rpc_pickler = api._default_pickler = _RPCS_OWN
