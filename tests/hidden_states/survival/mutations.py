"""Protections taken out of the code, to see that a survival test then fails. For forked children only: never undone."""

import os
import stat
from types import SimpleNamespace

import h5py

from dflash_lib.hidden_states import extraction_worker, shard_layout, store, verify


def no_file_fsync() -> None:
    """A file's content is not made durable before it is renamed."""
    real = os.fsync
    os.fsync = lambda fd: real(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else None


def no_folder_fsync() -> None:
    """A rename is not made durable."""
    real = os.fsync
    os.fsync = lambda fd: None if stat.S_ISDIR(os.fstat(fd).st_mode) else real(fd)


def no_rename() -> None:
    """The final name is written in place, piece by piece (fsynced in the end), instead of being renamed to."""
    def write_in_place(source, target):
        with open(source, "rb") as a, open(target, "wb", buffering=0) as b:
            while piece := a.read(4096):
                b.write(piece)
            os.fsync(b.fileno())
        os.unlink(source)
    os.replace = write_in_place


def no_digests() -> None:
    """Datasets are not compared with the checksums in their attributes."""
    store.has_digest = verify.has_digest = lambda _dataset, _digest: True


def no_chunk_checksums() -> None:
    """Chunks are written without Fletcher-32, which HDF5 would compare at every read."""
    real = h5py.h5d.create

    def create(*args, **more):
        if len(args) > 4:  # states; h5py itself, which makes the small datasets, names this argument
            args[4].remove_filter(h5py.h5z.FILTER_FLETCHER32)
        return real(*args, **more)

    h5py.h5d.create = create


class _EqualToAll:
    def __ne__(self, _other) -> bool:
        return False


def no_sample_hashes() -> None:
    """A sample's rows are not compared with their own checksum when they are read."""
    shard_layout.xxhash = SimpleNamespace(xxh3_64_intdigest=lambda _raw: _EqualToAll())


def no_launch() -> None:
    """Workers cannot be started: for a job that has nothing to do."""
    def fail(*_args, **_more):
        raise AssertionError("workers were started")
    extraction_worker.work = fail
