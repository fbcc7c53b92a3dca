"""From a model's name to a file that the engine loads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import Keys

from . import cache
from .cache import Progress
from .download import hub
from .download.catalog import GENERIC, SMOLLM2, Sampling
from .download.embedded import fetch, is_whole
from .errors import ModelFileError
from .gguf.conversion import VERSION, convert, key_of, needs_conversion
from .gguf.header import Header, read_header
from .gguf.support import check

__all__ = ["PreparedModel", "prepare"]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that can be loaded now.

    Attributes:
        name: What clients put into `model`.
        path: The file to load; it may be a converted copy in the cache.
        header: The header of that very file.
        defaults: Sampling values for requests that say none.
        system: System message for conversations that bring none, or None to leave that to the model's template.
    """

    name: str
    path: Path
    header: Header
    defaults: Sampling
    system: str | None = None


def prepare(model: str | os.PathLike[str] = SMOLLM2.name, *, progress: Progress | None = None) -> PreparedModel:
    """Finds a model, fetches and converts it where that is needed; the second time all is there already.

    Blocks for as long as a download takes. Processes and threads may call it at the same time: one works, the
    others wait for the outcome.

    Args:
        model: "smollm2", a path to a GGUF file, or a name on the hub: `owner/repo`, where that holds one GGUF file,
            else `owner/repo:file.gguf`. A file that exists goes before the hub.
        progress: Told of work that takes a while, in the thread that called or in one of the hub's client.

    Raises:
        ModelFileError: The model cannot be had, or the engine cannot load it; the message says how to mend it.
    """
    tell = progress or _silent
    if model == SMOLLM2.name:
        return _embedded(tell)
    path, exists = _locate(model)
    if isinstance(model, str) and not exists and (found := hub.split_name(model)) is not None:
        repository, file = found
        path = hub.download(repository, file, tell)
        return _prepared(repository.partition("/")[2].lower(), path, tell)
    if exists and path.is_dir():
        raise ModelFileError(f"{path} is a folder. Name the .gguf file in it.")
    if not exists:
        raise ModelFileError(
            f"There is no file {path}. Name {SMOLLM2.name}, a path to a .gguf file, or a hub name as "
            "owner/repo:file.gguf."
        )
    return _prepared(path.stem.lower(), path, tell)


def _locate(model: str | os.PathLike[str]) -> tuple[Path, bool]:
    path = Path(model)
    try:
        path = path.expanduser()
        return path, path.exists()
    except (OSError, RuntimeError):  # out of reach, too long, or in the home of nobody
        return path, False


def _silent(stage: str, done: int, total: int | None) -> None:
    """Where nobody wants to know."""


def _embedded(tell: Progress) -> PreparedModel:
    target = _target(SMOLLM2.file, SMOLLM2.sha256)
    header = _loadable(target)
    if header is None:
        with cache.lock(tell):
            header = _loadable(target)  # another process may have made it while this one waited
            if header is None:
                source = cache.directory() / "models" / SMOLLM2.file
                if not is_whole(SMOLLM2, source, tell):
                    fetch(SMOLLM2, source, tell)
                header = _converted(read_header(source), target, tell)
    return PreparedModel(SMOLLM2.name, target, header, SMOLLM2.sampling, SMOLLM2.system)


def _prepared(name: str, path: Path, tell: Progress) -> PreparedModel:
    header = read_header(path)
    convertible = needs_conversion(header)
    check(header, as_it_is=not convertible)
    if convertible:
        target = _target(path.name, key_of(path))
        ready = _loadable(target)
        if ready is None:
            with cache.lock(tell):
                ready = _loadable(target) or _converted(header, target, tell)
        header = ready
    return PreparedModel(name, header.path, header, _sampling(header))


def _target(file: str, key: str) -> Path:
    return cache.directory() / "converted" / f"{Path(file).stem}-{key[:16]}-v{VERSION}.gguf"


def _loadable(path: Path) -> Header | None:
    """The header of a file that was converted before; None where it is not there, or is no longer whole."""
    try:
        header = read_header(path)
        check(header, as_it_is=True)
    except ModelFileError:
        return None
    return header


def _converted(header: Header, target: Path, tell: Progress) -> Header:
    check(header, as_it_is=False)
    cache.need(header.size)
    convert(header, target, tell)
    done = read_header(target)
    check(done, as_it_is=True)
    return done


def _sampling(header: Header) -> Sampling:
    temperature, top_p = header.get(Keys.General.SAMPLING_TEMP), header.get(Keys.General.SAMPLING_TOP_P)
    return Sampling(
        temperature if isinstance(temperature, float) and 0 <= temperature <= 2 else GENERIC.temperature,
        top_p if isinstance(top_p, float) and 0 < top_p <= 1 else GENERIC.top_p,
    )
