"""``shmtrain simulate``: iteration time, throughput and staleness of ways and machines that are not at hand.

setting.py says what is simulated, shared.py how a link or a memory is shared (the one file that names
simpy), ways.py what a worker of each way does, run.py puts them together; paper.py holds the figures of the
ShmCaffe paper that its model is held against.
"""
