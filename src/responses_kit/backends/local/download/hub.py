"""Downloads from the Hugging Face hub, through `huggingface_hub` and its cache."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..cache import Progress
from ..errors import DiskFullError, ModelFileError

__all__ = ["download", "split_name"]

_HUB_TIMEOUT = 10.0
"""Seconds to wait for the hub's first answer."""

_MAX_LISTED_FILES = 30
"""Files that an error message lists."""

_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:[:/](?P<file>[\w.-][\w./ +-]*\.gguf))?", re.ASCII)


def split_name(name: str) -> tuple[str, str | None] | None:
    """Split `owner/repo`, `owner/repo:file.gguf` or `owner/repo/file.gguf` into the repository and the file.

    Returns:
        The repository and the file, which may be None; or None if the name has none of these forms.
    """
    match = _NAME.fullmatch(name)
    if match is None or ".." in name or (match["file"] is None and name.endswith(".gguf")):
        return None
    return match["repository"], match["file"]


def download(repository: str, file: str | None, progress: Progress, *, into: Path | None = None) -> Path:
    """Return a GGUF file of the hub, downloaded unless it is in the hub's cache.

    Args:
        repository: The repository, as `owner/repo`.
        file: The file's path inside the repository, or None for the only GGUF file.
        progress: Receives the progress of the download.
        into: A directory to download to, in place of the hub's cache.

    Raises:
        DiskFullError: The disk is full.
        ModelFileError: The hub is unreachable, refuses access or does not have the file; or `file` is None and the
            repository has several GGUF files, which the message lists.
    """
    from huggingface_hub import HfApi, hf_hub_download

    cached = [] if into else _find_cached(repository, file)
    if file and cached:
        return cached[0]
    with _translate_hub_errors(repository):
        try:
            # This call fails at once if the hub is unreachable, while a download retries for half a minute.
            siblings = HfApi().model_info(repository, timeout=_HUB_TIMEOUT).siblings or []
        except Exception:
            if len(cached) == 1:  # without a network, an earlier download serves
                return cached[0]
            raise
        chosen = _choose_file(repository, file, [sibling.rfilename for sibling in siblings])
        bar = _progress_bar_class(f"downloading {Path(chosen).name}", progress)
        return Path(hf_hub_download(repository, chosen, local_dir=into, tqdm_class=bar))


def _find_cached(repository: str, file: str | None) -> list[Path]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except Exception:  # the type for a missing snapshot differs between versions of the client
        return []
    return [path for path in sorted(folder.rglob("*.gguf")) if file in (None, path.relative_to(folder).as_posix())]


def _choose_file(repository: str, file: str | None, files: list[str]) -> str:
    models = sorted(name for name in files if name.endswith(".gguf"))
    listed = ", ".join(models[:_MAX_LISTED_FILES])
    if len(models) > _MAX_LISTED_FILES:
        listed += f" and {len(models) - _MAX_LISTED_FILES} more"
    if not models:
        raise ModelFileError(
            f"The hub repository {repository} contains no GGUF file. Look for another repository of the same "
            "model, with a name that ends in -GGUF."
        )
    if file is not None and file not in models:
        raise ModelFileError(f"The hub repository {repository} has no file {file}. Its GGUF files are: {listed}.")
    if file is None and len(models) > 1:
        raise ModelFileError(
            f"The hub repository {repository} contains {len(models)} GGUF files. Name one of them, for example "
            f"{repository}:{models[0]}. They are: {listed}."
        )
    return file or models[0]


def _progress_bar_class(stage: str, progress: Progress) -> type[Any]:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # exported, but not by its type hints

    base: Any = tqdm
    reported = 0

    class ProgressBar(base):  # type: ignore[misc]  # its type hints are incomplete
        """A progress bar of the hub's client that draws nothing and reports to `progress`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True  # tqdm then does not count, so `received` does
            super().__init__(*args, **kwargs)
            self.received = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            nonlocal reported
            self.received += int(n or 0)
            if self.total and reported < self.received <= self.total:  # there may be two bars, and they may go back
                reported = self.received
                progress(stage, reported, int(self.total))

    return ProgressBar


@contextmanager
def _translate_hub_errors(repository: str) -> Iterator[None]:
    """Translate errors of the hub's client into errors with a remedy."""
    from huggingface_hub import errors

    try:
        yield
    except ModelFileError:
        raise
    except errors.GatedRepoError:
        reason = "is gated. Accept its terms on the model's page, and log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "does not exist or is private. Check the name, or log in with `hf auth login`"
    except errors.HfHubHTTPError as error:
        reason = f"is not available: the hub responded with status {error.response.status_code}. Try again later"
    except Exception as error:  # the base class of network errors differs between versions of the client
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                "The disk of the hub's cache is full. Free some space, or set HF_HOME to a directory on another disk."
            ) from None
        reason = f"is unreachable ({type(error).__name__}). Check the network connection"
    else:
        return
    raise ModelFileError(f"The hub repository {repository} {reason}.")
