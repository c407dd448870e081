"""What the fork server loads once for all workers: their memory is shared until somebody writes to it."""

from __future__ import annotations

import gc

# Loaded for their imports. The box loads a transport only when it is used: here each worker would do so anew.
import shmtrain.worker  # noqa: F401
import smb.embedded
import smb.transport.shm  # noqa: F401

gc.collect()
gc.freeze()  # the collector would write to every object's header, and so copy the pages
