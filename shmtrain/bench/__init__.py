"""``shmtrain bench``: the box against MPI and gloo on the same vectors, in one interleaved run.

A conductor (run.py) starts groups of processes: workers at a box, ranks under each MPI's mpiexec, workers of
gloo. All of them sleep on a socket to the conductor (control.py) until they are told to make so many
exchanges (job.py), so that every measure of a round meets warm, idle opponents, in an order drawn by chance.
"""
