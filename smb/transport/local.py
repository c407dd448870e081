"""The transport to a box in the same process: no socket, the same mapping code."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from smb import layout, protocol
from smb.errors import RequestError
from smb.rendezvous import Ticket
from smb.service import Service
from smb.transport.base import Array, Opening, Options
from smb.transport.mapped import attach, watched


class LocalTransport:
    """One client of a service in this process."""

    name = "local"
    patient = True

    def __init__(self, service: Service, options: Options) -> None:
        self._service = service
        self._session = service.store.open_session(os.getpid(), options.name)

    def call(self, request: object, timeout: float) -> Any:
        layout.put(request, bytearray())  # refuses what could not be sent either
        return self._service.answer(Ticket(self._session), request).record

    def open(self, request: protocol.Create | protocol.Attach, initial: Array | None = None) -> Opening:
        layout.put(request, bytearray())
        store = self._service.store
        answer = self._service.answer(Ticket(self._session), request)
        reply, entry = answer.record, answer.entry
        own = entry.mapping if entry else None
        assert isinstance(reply, protocol.Opened)
        assert own is not None
        try:
            mapping = attach((own.control_fd, own.payload_fd), reply, request, store.life)
            if reply.created and initial is not None:
                mapping.initialise(initial)
                store.publish(self._session, reply.segment)
        except BaseException:
            if answer.undo:
                with contextlib.suppress(RequestError):
                    answer.undo()
            raise
        mapping.tally(self._session.number)
        return watched(mapping, reply, self, store.lease)

    def orphan(self) -> None:
        """Nothing belongs to the process but memory."""

    def close(self) -> None:
        self._service.store.end_session(self._session)
