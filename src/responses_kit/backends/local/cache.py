"""The cache directory of model files, and atomic writes to it.

Layout of the directory::

    models/       embedded models as downloaded
    converted/    models in the form that the engine loads
    downloads/    downloads in progress, emptied before and after each download
    lock          locked by the process that writes; the operating system releases it if the process dies
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from .errors import DiskFullError, ModelFileError

__all__ = [
    "CachedFile",
    "Progress",
    "check_free_space",
    "directory",
    "download_directory",
    "list_files",
    "lock",
    "translate_write_errors",
    "write_atomically",
]

Progress = Callable[[str, int, int | None], None]
"""Receives the progress of a long operation: its stage, the bytes done, and the bytes in total or None if unknown."""


CACHE_VARIABLE = "RESPONSES_KIT_CACHE"
"""The environment variable that names the cache directory."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A model file in the cache.

    Attributes:
        path: The file.
        size: Its length in bytes.
        is_converted: Whether it is in the form that the engine loads.
    """

    path: Path
    size: int
    is_converted: bool


def directory() -> Path:
    """Return the user's cache directory, which may not exist yet.

    It is the value of `RESPONSES_KIT_CACHE`, or else `responses-kit` in the system's cache directory.

    Raises:
        ModelFileError: The variable is not set, and the user has no home directory.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser().absolute() / "responses-kit"
    except RuntimeError:
        raise ModelFileError(
            f"The model cache has no location, because this user has no home directory. Set {CACHE_VARIABLE} to a "
            "directory."
        ) from None


def list_files() -> list[CachedFile]:
    """Return the model files in the cache, ordered by name."""
    return [
        CachedFile(path, path.stat().st_size, folder == "converted")
        for folder in ("models", "converted")
        for path in sorted((directory() / folder).glob("*.gguf"))
    ]


@contextmanager
def translate_write_errors() -> Iterator[None]:
    """Translate an `OSError` of the block into an error with a remedy.

    Raises:
        DiskFullError: The disk or the user's quota is full.
        ModelFileError: The cache cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"The disk of the model cache {directory()} is full. Free some space, or set {CACHE_VARIABLE} to a "
                "directory on another disk."
            ) from None
        raise ModelFileError(
            f"The model cache {directory()} cannot be written: {error.strerror}. Set {CACHE_VARIABLE} to a directory "
            "that this user may write to."
        ) from None


@contextmanager
def lock(progress: Progress) -> Iterator[None]:
    """Hold the cache's lock during the block, so that one process or thread at a time writes to it.

    Args:
        progress: Called once if the lock is held elsewhere.

    Raises:
        ModelFileError: The cache cannot be written.
    """
    with translate_write_errors():
        directory().mkdir(parents=True, exist_ok=True)
        file_lock = FileLock(directory() / "lock", thread_local=False)
        try:
            file_lock.acquire(timeout=0)
        except Timeout:
            progress("waiting for another process that prepares a model", 0, None)
            file_lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        file_lock.release()


@contextmanager
def download_directory() -> Iterator[Path]:
    """Yield an empty directory for a download, and remove it afterwards. The caller holds `lock`."""
    path = directory() / "downloads"
    shutil.rmtree(path, ignore_errors=True)  # a killed process may have left it
    try:
        with translate_write_errors():
            path.mkdir(parents=True)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def write_atomically(target: Path) -> Iterator[BinaryIO]:
    """Yield a file that is renamed to `target` if the block succeeds, and removed if not. The caller holds `lock`.

    Raises:
        DiskFullError: The disk is full.
        ModelFileError: The cache cannot be written.
    """
    part = target.with_name(target.name + ".part")  # a fixed name, so that leftovers of a killed process are replaced
    try:
        with translate_write_errors():
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
    finally:
        with translate_write_errors():
            part.unlink(missing_ok=True)


def check_free_space(size: int, free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free) -> None:
    """Raise an error unless the cache's disk has at least `size` bytes free.

    Args:
        size: Bytes that the next step needs.
        free: Returns the free bytes on a directory's disk.

    Raises:
        DiskFullError: The disk has less free space.
    """
    with translate_write_errors():
        available = free(directory())
    if available < size:
        raise DiskFullError(
            f"The disk of the model cache {directory()} has {available >> 20:,} MiB left, but {size >> 20:,} MiB are "
            f"needed. Free some space, or set {CACHE_VARIABLE} to a directory on another disk."
        )
