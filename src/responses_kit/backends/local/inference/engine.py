"""One loaded model and its key-value state: tokens in, logits out.

The engine is the llama.cpp inside ctransformers, called through its C functions. Its tokenizer and sampler are not
used: the tokenizer overflows the stack on a long run of letters or spaces, which kills the process, and the sampler
draws the same random number for all tokens within one second.
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
"""One float32 for each token of the vocabulary."""

_SMALL_MODEL_BYTES = 1_000_000_000
"""File size in bytes below which two cores evaluate 32 tokens well within a second."""


class Engine:
    """A model that evaluates one sequence at a time. It is not thread-safe.

    Args:
        path: A model file that `prepare` returned.
        context_length: The maximum length of the sequence, in tokens.
        gpu_layers: Layers to offload to the GPU.
        threads: CPU threads for an evaluation.

    Attributes:
        context_length: The maximum length of the sequence, in tokens.
        tokens: The tokens in the key-value state.
        batch_size: The maximum number of tokens per evaluation; small enough to check for cancellation in between.

    Raises:
        ConfigurationError: The engine or the file cannot be loaded.
    """

    def __init__(self, path: str | os.PathLike[str], *, context_length: int, gpu_layers: int, threads: int) -> None:
        if gpu_layers:
            _require_gpu()
        try:
            self._llm: LLM | None = LLM(
                os.fspath(path),
                config=Config(context_length=context_length, gpu_layers=gpu_layers),
                lib=None if gpu_layers else _cpu_library(),
            )
        except OSError as error:
            raise ConfigurationError(_library_error(gpu_layers)) from error
        except (RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"The engine could not load {path}, and gave no reason. Check that there is enough memory; if the file "
                "is in the cache, delete it, so that it is converted again."
            ) from error
        self.context_length: int = self._llm.context_length
        self.tokens: list[int] = []
        self.batch_size = 256 if gpu_layers else 32 if Path(path).stat().st_size < _SMALL_MODEL_BYTES else 8
        self._threads = threads
        self._vocabulary_size: int = self._llm.vocab_size
        self._view: tuple[int, Logits] | None = None

    def rewind(self, tokens: Sequence[int]) -> int:
        """Reduce the state to the prefix that it shares with a prompt.

        Args:
            tokens: The prompt. At least its last token remains to be evaluated, because only that yields logits.

        Returns:
            The number of the prompt's tokens that need no evaluation.
        """
        reused = min(common_prefix_length(self.tokens, tokens), len(tokens) - 1)
        del self.tokens[reused:]
        return reused

    def evaluate(self, tokens: Sequence[int]) -> None:
        """Evaluate at most `batch_size` tokens and append them to the state.

        Raises:
            ModelError: The engine failed; the state is unchanged.
            ValueError: The tokens exceed the batch size or the context, which would kill the process.
        """
        count, past = len(tokens), len(self.tokens)
        if self._llm is None or not 0 < count <= self.batch_size or past + count > self.context_length:
            raise ValueError(f"cannot evaluate {count} tokens behind {past} of {self.context_length}")
        # The evaluation overwrites the state from `past` on, which `tokens` does not cover, so `tokens` is correct
        # even if the evaluation fails.
        array = (ctypes.c_int * count)(*tokens)
        if not self._llm.ctransformers_llm_batch_eval(array, count, past, self.batch_size, self._threads):
            raise ModelError("The model failed to evaluate the input.")
        self.tokens.extend(tokens)

    @property
    def logits(self) -> Logits:
        """The logits after the last token: a writable view of the engine's memory, valid until the next evaluation."""
        if self._llm is None:
            raise ValueError("the engine is closed")
        pointer = self._llm.ctransformers_llm_logits_data()
        address = ctypes.addressof(pointer.contents)
        if self._view is None or self._view[0] != address:
            self._view = (address, np.ctypeslib.as_array(pointer, (self._vocabulary_size,)))
        return self._view[1]

    def close(self) -> None:
        """Free the model and its state."""
        self._view = None
        self._llm = None
        self.tokens.clear()


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def _cpu_library() -> str | None:
    """Return the build of the engine for this processor, or None to let ctransformers choose.

    ctransformers chooses by running `sys.executable`, which takes a second, and which is not a Python interpreter if
    the interpreter is embedded in a server.
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
    """Raise an error unless there is a usable GPU; the engine would otherwise abort the process."""
    if sys.platform == "darwin":
        return
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        found = False
    if not found:
        raise ConfigurationError(
            "'gpu_layers' needs an NVIDIA GPU with its driver, but no usable GPU was found. Set 'gpu_layers' to 0."
        )


def _library_error(gpu_layers: int) -> str:
    if gpu_layers and sys.platform == "darwin":
        return (
            "'gpu_layers' needs a build of ctransformers with Metal. Install it with "
            "`CT_METAL=1 pip install --force-reinstall ctransformers --no-binary ctransformers`, or set 'gpu_layers' "
            "to 0."
        )
    if gpu_layers:
        return (
            "'gpu_layers' needs the CUDA 12 libraries, but they could not be loaded. "
            "Install them with `pip install \"ctransformers[cuda]\"`, or set 'gpu_layers' to 0."
        )
    return (
        f"ctransformers has no prebuilt engine for this machine ({platform.system()} {platform.machine()}). "
        "Build one with `pip install --force-reinstall ctransformers --no-binary ctransformers`, "
        "or serve the model with another engine and connect it as an upstream backend."
    )
