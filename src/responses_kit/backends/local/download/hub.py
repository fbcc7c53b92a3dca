"""Models by their names on the hub, through `huggingface_hub` and its own cache."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..cache import Progress
from ..errors import ModelFileError, NoRoomError

__all__ = ["download", "split_name"]

_PATIENCE = 10.0
"""Seconds to wait for the hub's first answer."""

_LISTED = 30

_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:[:/](?P<file>[\w.-][\w./ +-]*\.gguf))?", re.ASCII)


def split_name(name: str) -> tuple[str, str | None] | None:
    """Takes `owner/repo`, `owner/repo:file.gguf` or `owner/repo/file.gguf` apart; None for anything else."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name or (match["file"] is None and name.endswith(".gguf")):
        return None
    return match["repository"], match["file"]


def download(repository: str, file: str | None, progress: Progress, *, into: Path | None = None) -> Path:
    """Gets one GGUF file. What is in the hub's cache is taken from there, without a look at the network.

    Args:
        repository: As `owner/repo`.
        file: Path inside the repository; None for its only GGUF file.
        progress: Told the bytes received.
        into: A directory of one's own, in place of the hub's cache.

    Raises:
        NoRoomError: The disk is full.
        ModelFileError: The hub is out of reach, or does not give the file; or no file is named and there are several:
            the message lists them.
    """
    from huggingface_hub import HfApi, hf_hub_download

    cached = [] if into else _cached(repository, file)
    if file and cached:
        return cached[0]
    with _asking(repository):
        try:
            # Asked first, since this says at once whether the hub is in reach; a download tries for half a minute.
            found = HfApi().model_info(repository, timeout=_PATIENCE).siblings or []
        except Exception:
            if len(cached) == 1:  # without a network, what was downloaded before will do
                return cached[0]
            raise
        chosen = _choose(repository, file, [sibling.rfilename for sibling in found])
        bar = _bar(f"downloading {Path(chosen).name}", progress)
        return Path(hf_hub_download(repository, chosen, local_dir=into, tqdm_class=bar))


def _cached(repository: str, file: str | None) -> list[Path]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except Exception:  # not there, whatever the client calls it
        return []
    return [path for path in sorted(folder.rglob("*.gguf")) if file in (None, path.relative_to(folder).as_posix())]


def _choose(repository: str, file: str | None, files: list[str]) -> str:
    models = sorted(name for name in files if name.endswith(".gguf"))
    listed = ", ".join(models[:_LISTED]) + (f" and {len(models) - _LISTED} more" if len(models) > _LISTED else "")
    if not models:
        raise ModelFileError(
            f"The hub's {repository} holds no GGUF file. Many models have a second repository for these."
        )
    if file is not None and file not in models:
        raise ModelFileError(f"The hub's {repository} has no file {file}. There are: {listed}.")
    if file is None and len(models) > 1:
        raise ModelFileError(
            f"The hub's {repository} holds {len(models)} GGUF files. Name one, as {repository}:{models[0]}. "
            f"There are: {listed}."
        )
    return file or models[0]


def _bar(stage: str, progress: Progress) -> type[Any]:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # exported, but not by its hints

    base: Any = tqdm
    told = 0

    class Bar(base):  # type: ignore[misc]  # its hints are incomplete
        """What the hub's client believes to be a progress bar; it draws nothing and passes the numbers on."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True  # with this, tqdm keeps no count of its own
            super().__init__(*args, **kwargs)
            self.received = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            nonlocal told
            self.received += int(n or 0)
            if self.total and told < self.received <= self.total:  # there may be two bars, and they may go back
                told = self.received
                progress(stage, told, int(self.total))

    return Bar


@contextmanager
def _asking(repository: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except ModelFileError:
        raise
    except errors.GatedRepoError:
        why = "asks for consent first: give it on the model's page, and log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        why = "does not exist, or is private: check the name, or log in with `hf auth login`"
    except errors.HfHubHTTPError as problem:
        why = f"cannot be had now: the hub answers with status {problem.response.status_code}"
    except Exception as problem:  # the client's errors of the network have changed their base more than once
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomError(
                "The disk of the hub's cache is full. Free some room, or set HF_HOME elsewhere."
            ) from None
        why = f"is out of reach from here ({type(problem).__name__})"
    else:
        return
    raise ModelFileError(f"The hub's {repository} {why}.")
