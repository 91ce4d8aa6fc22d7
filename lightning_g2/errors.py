"""Exceptions of lightning_g2. Every message states the value, the rule it breaks and the remedy.

```
G2Error
├── ConfigurationError (ValueError)   an option is unknown, out of range or contradicts another
├── ShapeError (ValueError)           a tensor's shape or dtype is not the documented one
├── TransportError (RuntimeError)     the connection between a rank and a server
│   ├── ServerStartError              a server process did not come up
│   └── ServerLostError               a server process ended or stopped answering while it was needed
├── NonFiniteGradientError (FloatingPointError)   a gradient holds NaN or Inf, and the job is to stop at that
├── PeerFailedError (RuntimeError)    another rank failed; the message names it and its error
│   └── PeerStoppedError              another rank was told to stop, and with it the job; nothing is wrong
├── DroppedError (RuntimeError)       the job goes on without this rank, which has to stop
└── ProtocolError (RuntimeError)      a packet breaks the protocol: gap in a sequence, unknown rank, wrong size
```

Each class can be built from its message alone, so that an error raised in a server keeps its type on the way to a rank.
"""


class G2Error(Exception):
    """Base of every error that lightning_g2 raises on purpose."""


class ConfigurationError(G2Error, ValueError):
    """An option is unknown, out of range, or contradicts another."""


class ShapeError(G2Error, ValueError):
    """A tensor's shape or dtype is not the documented one."""


class TransportError(G2Error, RuntimeError):
    """The connection between a rank and a server cannot be made or does not work."""


class ServerStartError(TransportError):
    """A server process did not come up."""


class ServerLostError(TransportError):
    """A server process ended, or stopped answering, while a rank still needed it."""


class NonFiniteGradientError(G2Error, FloatingPointError):
    """A gradient holds NaN or Inf, and the job was told to stop at that."""


class PeerFailedError(G2Error, RuntimeError):
    """Another rank of the job failed; the message names it and quotes its error."""


class PeerStoppedError(PeerFailedError):
    """Another rank of the job was told to stop (SIGTERM), so the job stops in order."""


class DroppedError(G2Error, RuntimeError):
    """The job goes on without this rank, which was not heard of or has left; whatever it still sends is refused."""


class ProtocolError(G2Error, RuntimeError):
    """A packet breaks the protocol between ranks and servers."""
