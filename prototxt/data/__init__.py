"""Data sources, read ahead in a child process that knows no torch.

config.py       what a reader is told, as JSON
datum_source.py batches of Datum records; store.py: what they lie in: lmdb_store.py, leveldb_store.py
image_source.py images of a list (lists.py); window_source.py: windows of images; decode.py: OpenCV
hdf5_source.py  rows of HDF5 files
ring.py         the slots that batches are written to, in memory both sides map
reader.py       the child;  source.py: the parent's side, the only one that imports torch

For ``shmtrain data``: convert.py (idx and CIFAR files), imageset.py, mean.py, summary.py; write.py and
leveldb_write.py put records into a database; apart.py does what may crash in a process of its own.
"""
