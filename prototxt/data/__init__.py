"""Data sources, read ahead in a child process that knows no torch.

config.py       what a reader is told, as JSON
lmdb_source.py  batches of an LMDB of Datum records;  hdf5_source.py: rows of HDF5 files
ring.py         the slots that batches are written to, in memory both sides map
reader.py       the child;  source.py: the parent's side, the only one that imports torch
convert.py      idx and CIFAR files to LMDB, for ``shmtrain data``
"""
