"""What the fork server loads once for all workers: their memory is shared until somebody writes to it."""

from __future__ import annotations

import gc

import shmtrain.worker  # noqa: F401  (loaded for its imports)

gc.collect()
gc.freeze()  # the collector would write to every object's header, and so copy the pages
