"""Where model files are kept, and the only way in which one gets there: whole, or not at all.

Layout of the cache directory::

    models/       embedded models as they were fetched
    converted/    models in the form that the engine loads
    downloads/    work in progress, emptied before and after each download
    lock          held by whoever writes; the system frees it when that process dies
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

from .errors import ModelFileError, NoRoomError

__all__ = ["Cached", "Progress", "directory", "listing", "lock", "new_file", "scratch", "writing"]

Progress = Callable[[str, int, int | None], None]
"""Told of work that takes a while: what is being done, bytes done, bytes in total or None where nobody knows."""


VARIABLE = "RESPONSES_KIT_CACHE"


@dataclass(frozen=True, slots=True)
class Cached:
    """A file in the cache: its path, its size in bytes, and whether it is in the form that the engine loads."""

    path: Path
    size: int
    converted: bool


def directory() -> Path:
    """The user's cache directory; it need not exist yet.

    `RESPONSES_KIT_CACHE` names it; otherwise it is `responses-kit` in the place where the system keeps caches.
    """
    if chosen := os.environ.get(VARIABLE):
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
        raise ModelFileError(f"This user has no home directory for the model cache: set {VARIABLE} to one.") from None


def listing() -> list[Cached]:
    """The model files in the cache, by name."""
    return [
        Cached(path, path.stat().st_size, folder == "converted")
        for folder in ("models", "converted")
        for path in sorted((directory() / folder).glob("*.gguf"))
    ]


@contextmanager
def writing() -> Iterator[None]:
    """Turns what a disk may say while it is written to into an error that says what to do."""
    try:
        yield
    except OSError as problem:
        advice = f"Set {VARIABLE} to a directory with more room or the right permissions."
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomError(
                f"The disk of the model cache {directory()} is full. Free some room, or: {advice}"
            ) from None
        raise ModelFileError(f"The model cache {directory()} cannot be written: {problem.strerror}. {advice}") from None


@contextmanager
def lock(progress: Progress) -> Iterator[None]:
    """Lets one process or thread at a time write to the cache; the others wait, and are told so.

    Raises:
        ModelFileError: The cache cannot be written.
    """
    with writing():
        directory().mkdir(parents=True, exist_ok=True)
        held = FileLock(directory() / "lock", thread_local=False)
        try:
            held.acquire(timeout=0)
        except Timeout:
            progress("waiting for another process that prepares a model", 0, None)
            held.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        held.release()


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty directory for a download, gone afterwards; hold `lock` meanwhile."""
    path = directory() / "downloads"
    shutil.rmtree(path, ignore_errors=True)  # of a process that was killed
    try:
        with writing():
            path.mkdir(parents=True)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name whole, when the block ends, or not at all; hold `lock` meanwhile.

    Raises:
        NoRoomError: The disk is full.
        ModelFileError: The cache cannot be written.
    """
    part = target.with_name(target.name + ".part")  # one name: what a killed process left is written over
    try:
        with writing():
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
    finally:
        with writing():
            part.unlink(missing_ok=True)


def need(size: int, free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free) -> None:
    """Refuses to begin what cannot end well.

    Raises:
        NoRoomError: The cache's disk has less than `size` bytes left.
    """
    with writing():
        left = free(directory())
    if left < size:
        raise NoRoomError(
            f"The disk of the model cache {directory()} has {left >> 20:,} MiB left, and {size >> 20:,} MiB are "
            f"needed. Free some room, or set {VARIABLE} to a directory with more."
        )
