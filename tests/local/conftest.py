from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from responses_kit.backends.local.model_files import PreparedModel, prepare


@pytest.fixture(scope="session")
def smollm2() -> PreparedModel:
    """Return the default model, which is downloaded to the user's cache the first time."""
    return prepare("smollm2")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system with one MiB, or skip the test if none can be mounted."""
    path = tmp_path / "small"
    path.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this test must mount a file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)
