"""What shm and local share: the client's side of a segment that is mapped into its process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from smb import protocol
from smb.segment import Life, Mapping
from smb.transport.base import Opening, Transport

log = logging.getLogger(__name__)
PATIENCE = 15.0  # seconds beyond the lease after which an operation that a stuck holder blocks gives up


def attach(
    descriptors: Sequence[int], reply: protocol.Opened, request: protocol.Create | protocol.Attach, life: Life
) -> Mapping:
    """Map what the daemon opened; the descriptors stay the caller's."""
    control, payload = descriptors
    readonly = isinstance(request, protocol.Attach) and request.readonly
    return Mapping.attach(control, payload, reply.count, reply.dtype, readonly=readonly, life=life)


def watched(mapping: Mapping, reply: protocol.Opened, transport: Transport, lease: float) -> Opening:
    """Let the daemon know of holders that are stuck and of chunks that dead writers left half-written."""
    number = reply.segment

    def on_stuck(chunk: int, thread: int, seconds: float) -> None:
        verdict: protocol.Verdict = transport.call(protocol.Stuck(number, chunk, thread), 0.0)
        if verdict.killed:
            log.warning("chunk %d was held by %s for %.0f s: killed", chunk, verdict.holder, verdict.seconds)
        elif verdict.seconds > lease or (seconds > lease and verdict.holder):
            holder = verdict.holder
            log.warning("chunk %d is held by %s for %.0f s and cannot be freed", chunk, holder, seconds)

    def on_torn(chunk: int) -> None:
        transport.call(protocol.Mend(number), 0.0)

    mapping.on_stuck, mapping.on_torn = on_stuck, on_torn
    mapping.patience = lease + PATIENCE
    return Opening(mapping, reply)
