"""The error tree says what the caller may do next.

SmbError
|- RequestError      the request was wrong; the connection stays usable
`- TransportError    the connection failed and its state is unknown; only close() is allowed
"""


class SmbError(Exception):
    """Any failure of the memory box."""


class RequestError(SmbError):
    """The request was wrong; the connection stays usable."""


class TransportError(SmbError):
    """The connection failed and its state is unknown; only close() is allowed."""


class RangeError(RequestError):
    """The range runs past the end of the segment."""


class UnknownKey(RequestError):
    """No segment has this key."""


class KeyExists(RequestError):
    """A segment of this key exists already, or exists with another count, dtype, lifetime or meta."""


class TypeMismatch(RequestError):
    """The array's dtype or memory layout does not fit the segment."""


class NonFinite(RequestError):
    """The caller's values hold NaN or Inf and were not applied; not to be retried."""


class OutOfMemory(RequestError):
    """The segment does not fit into what the daemon may still use."""


class NotPermitted(RequestError):
    """The client's rights do not allow this operation."""


class NotSupported(RequestError):
    """The transport or the daemon cannot do this operation."""


class WaitTimeout(RequestError):
    """The awaited event did not come in time."""


class ProtocolError(RequestError):
    """A frame does not follow the protocol."""


class Away(RequestError):
    """No daemon can be reached just now and the request was not made; the box goes on trying."""


class Closed(RequestError):
    """The object was closed or detached before."""


class Restarted(RequestError):
    """The daemon restarted, or the lease ended: the operation under way was dropped; the box is usable."""
