"""One loaded model and its key-value state: tokens in, logits out.

The engine is the llama.cpp inside ctransformers, called through its C functions. Its tokenizer and its sampler are
left alone: the tokenizer overflows the stack on a long run of letters or spaces and so ends the process, and the
sampler draws the same random number for every token of one second.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from ctransformers.llm import LLM, Config

from ....errors import ConfigurationError, ModelError

__all__ = ["Engine", "Logits"]

Logits: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
"""One float for each token of the vocabulary."""

_SMALL_MODEL = 1_000_000_000
"""Bytes up to which a model evaluates 32 tokens well within a second on two cores."""


class Engine:
    """A model that evaluates one sequence at a time. Not thread-safe: whoever leased it has it alone.

    Args:
        path: A model file that was prepared for this engine.
        context_length: Tokens that the sequence may have.
        gpu_layers: Layers to keep on the GPU.
        threads: CPU threads for an evaluation.

    Attributes:
        tokens: What the key-value state holds; what follows is evaluated behind it.
        batch: How many tokens to evaluate in one go, so that there is time to look up in between.

    Raises:
        ConfigurationError: The engine or the file cannot be loaded; says why as far as the engine tells.
    """

    def __init__(self, path: str | os.PathLike[str], *, context_length: int, gpu_layers: int, threads: int) -> None:
        if gpu_layers:
            _require_gpu()
        try:
            self._llm: LLM | None = LLM(
                os.fspath(path),
                config=Config(context_length=context_length, gpu_layers=gpu_layers),
                lib=None if gpu_layers else _build(),
            )
        except OSError as problem:
            raise ConfigurationError(_cannot_load_library(gpu_layers)) from problem
        except (RuntimeError, ValueError) as problem:
            raise ConfigurationError(
                f"The engine could not load {Path(path).name}, and does not say why. Check that there is enough memory "
                "and delete the file from the cache, so that it is made anew; or choose another model."
            ) from problem
        self.context_length: int = self._llm.context_length
        self.tokens: list[int] = []
        self.batch = 256 if gpu_layers else 32 if Path(path).stat().st_size < _SMALL_MODEL else 8
        self._threads = threads
        self._vocabulary: int = self._llm.vocab_size
        self._view: tuple[int, Logits] | None = None

    def rewind(self, tokens: Sequence[int]) -> int:
        """Forgets all but the prefix that the state shares with a prompt.

        Args:
            tokens: The prompt. Its last token is always left to evaluate, as only that gives logits.

        Returns:
            How many of the prompt's tokens need no evaluation.
        """
        kept = min(shared(self.tokens, tokens), len(tokens) - 1)
        del self.tokens[kept:]
        return kept

    def evaluate(self, tokens: Sequence[int]) -> None:
        """Evaluates at most `batch` tokens behind those that the state holds.

        Raises:
            ModelError: The engine failed; the state is as before.
            ValueError: More tokens than a batch or the context can take, which would end the process.
        """
        count, past = len(tokens), len(self.tokens)
        if self._llm is None or not 0 < count <= self.batch or past + count > self.context_length:
            raise ValueError(f"cannot evaluate {count} tokens behind {past} of {self.context_length}")
        # Beyond `past` the state is overwritten from here on, and `tokens` never claimed anything of it: whatever
        # happens inside, what `tokens` says stays true.
        array = (ctypes.c_int * count)(*tokens)
        if not self._llm.ctransformers_llm_batch_eval(array, count, past, self.batch, self._threads):
            raise ModelError("The model failed to evaluate the input.")
        self.tokens.extend(tokens)

    @property
    def logits(self) -> Logits:
        """Logits after the last token evaluated: the engine's own memory, writable, true until the next evaluation."""
        if self._llm is None:
            raise ValueError("the engine is closed")
        pointer = self._llm.ctransformers_llm_logits_data()
        address = ctypes.addressof(pointer.contents)
        if self._view is None or self._view[0] != address:
            self._view = (address, np.ctypeslib.as_array(pointer, (self._vocabulary,)))
        return self._view[1]

    def close(self) -> None:
        """Frees the model and its state."""
        self._view = None
        self._llm = None
        self.tokens.clear()


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def _build() -> str | None:
    """The build for this processor, where that is easily told; otherwise ctransformers finds out.

    It does so by starting `sys.executable` anew, which takes a second, and is no Python at all where the
    interpreter is embedded in a server.
    """
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    except OSError:
        return None
    if platform.machine() != "x86_64":
        return None
    if {"avx2", "fma", "f16c"} <= set(flags):
        return "avx2"
    return "avx" if {"avx", "f16c"} <= set(flags) else "basic"


def _require_gpu() -> None:
    """Looks for a usable GPU first: the engine's own answer to finding none is to end the process."""
    if sys.platform == "darwin":
        return
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        found = False
    if not found:
        raise ConfigurationError("gpu_layers needs an NVIDIA GPU and its driver, and none is usable here. Set it to 0.")


def _cannot_load_library(gpu_layers: int) -> str:
    if gpu_layers and sys.platform == "darwin":
        return (
            "gpu_layers needs ctransformers built with Metal: "
            "`CT_METAL=1 pip install --force-reinstall ctransformers --no-binary ctransformers`. Or set it to 0."
        )
    if gpu_layers:
        return (
            "gpu_layers needs the CUDA 12 libraries, and they do not load here. "
            'Install them with `pip install "ctransformers[cuda]"`, or set gpu_layers to 0.'
        )
    return (
        f"ctransformers has no ready-made engine for this machine ({platform.system()} {platform.machine()}). "
        "Build one with `pip install --force-reinstall ctransformers --no-binary ctransformers`, "
        "or serve the model with another engine behind the upstream backend."
    )
