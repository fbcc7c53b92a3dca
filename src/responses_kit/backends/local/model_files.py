"""Resolves a model's name to a file that the engine loads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import Keys

from . import cache
from .cache import Progress
from .download import hub
from .download.catalog import GENERIC_SAMPLING, SMOLLM2, SamplingDefaults
from .download.embedded import fetch, is_intact
from .errors import ModelFileError
from .gguf.conversion import CONVERSION_VERSION, convert, file_fingerprint, is_conversion_required
from .gguf.header import Header, read_header
from .gguf.support import check_supported

__all__ = ["PreparedModel", "prepare"]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready to load.

    Attributes:
        name: The model's name in requests.
        path: The file to load, which may be a converted copy in the cache.
        header: The header of that file.
        defaults: Sampling parameters for requests without their own.
        system: The system message added to conversations without one, or None to leave that to the model's template.
    """

    name: str
    path: Path
    header: Header
    defaults: SamplingDefaults
    system: str | None = None


def prepare(model: str | os.PathLike[str] = SMOLLM2.name, *, progress: Progress | None = None) -> PreparedModel:
    """Find a model, and download and convert it if necessary.

    The call blocks during a download. Processes and threads may call it at the same time: one does the work, and the
    rest wait for the result.

    Args:
        model: "smollm2", a path to a GGUF file, or a hub name: `owner/repo:file.gguf`, or `owner/repo` if the
            repository has only one GGUF file. An existing file takes precedence over the hub.
        progress: Receives the progress of long operations, in the calling thread or in a thread of the hub's client.

    Raises:
        ModelFileError: The model is not available, or the engine cannot load it; the message gives a remedy.
    """
    progress = progress or _ignore_progress
    if model == SMOLLM2.name:
        return _prepare_embedded(progress)
    path, exists = _locate(model)
    if isinstance(model, str) and not exists and (parts := hub.split_name(model)) is not None:
        repository, file = parts
        path = hub.download(repository, file, progress)
        return _prepare_file(repository.partition("/")[2].lower(), path, progress)
    if exists and path.is_dir():
        raise ModelFileError(f"{path} is a directory. Pass the path of the .gguf file in it.")
    if not exists:
        raise ModelFileError(
            f"There is no file {path}. Name {SMOLLM2.name}, a path to a .gguf file, or a hub name such as "
            "owner/repo:file.gguf."
        )
    return _prepare_file(path.stem.lower(), path, progress)


def _locate(model: str | os.PathLike[str]) -> tuple[Path, bool]:
    path = Path(model)
    try:
        path = path.expanduser()
        return path, path.exists()
    except (OSError, RuntimeError):  # unreachable, too long, or in the home directory of an unknown user
        return path, False


def _ignore_progress(stage: str, done: int, total: int | None) -> None:
    """Accept a progress report and do nothing."""


def _prepare_embedded(progress: Progress) -> PreparedModel:
    target = _converted_path(SMOLLM2.file, SMOLLM2.sha256)
    header = _read_converted(target)
    if header is None:
        with cache.lock(progress):
            header = _read_converted(target)  # another process may have written it during the wait for the lock
            if header is None:
                source = cache.directory() / "models" / SMOLLM2.file
                if not is_intact(SMOLLM2, source, progress):
                    fetch(SMOLLM2, source, progress)
                header = _convert(read_header(source), target, progress)
    return PreparedModel(SMOLLM2.name, target, header, SMOLLM2.sampling, SMOLLM2.system)


def _prepare_file(name: str, path: Path, progress: Progress) -> PreparedModel:
    header = read_header(path)
    must_convert = is_conversion_required(header)
    check_supported(header, is_final=not must_convert)
    if must_convert:
        target = _converted_path(path.name, file_fingerprint(path))
        converted = _read_converted(target)
        if converted is None:
            with cache.lock(progress):
                converted = _read_converted(target) or _convert(header, target, progress)
        header = converted
    return PreparedModel(name, header.path, header, _sampling_defaults(header))


def _converted_path(file: str, key: str) -> Path:
    return cache.directory() / "converted" / f"{Path(file).stem}-{key[:16]}-v{CONVERSION_VERSION}.gguf"


def _read_converted(path: Path) -> Header | None:
    """Return the header of an earlier conversion, or None if the file is missing or damaged."""
    try:
        header = read_header(path)
        check_supported(header, is_final=True)
    except ModelFileError:
        return None
    return header


def _convert(header: Header, target: Path, progress: Progress) -> Header:
    check_supported(header, is_final=False)
    cache.check_free_space(header.size)
    convert(header, target, progress)
    converted = read_header(target)
    check_supported(converted, is_final=True)
    return converted


def _sampling_defaults(header: Header) -> SamplingDefaults:
    temperature, top_p = header.get(Keys.General.SAMPLING_TEMP), header.get(Keys.General.SAMPLING_TOP_P)
    return SamplingDefaults(
        temperature if isinstance(temperature, float) and 0 <= temperature <= 2 else GENERIC_SAMPLING.temperature,
        top_p if isinstance(top_p, float) and 0 < top_p <= 1 else GENERIC_SAMPLING.top_p,
    )
