"""``shmtrain compare``: one solver trained by several ways of sharing, side by side. Loads no torch."""
