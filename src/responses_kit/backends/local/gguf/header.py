"""Reads the header of a GGUF file, trusting nothing in it.

Why not `gguf.GGUFReader`: it builds one numpy array per string, which takes two seconds for a vocabulary of 49,152
tokens where this takes a tenth, and a torn file ends in an `IndexError`. Its tables of types are used.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, Keys

from ..errors import ModelFileError

__all__ = ["Field", "Header", "Tensor", "read_header"]

MAX_HEADER = 64 * 2**20
"""Bytes of metadata that are read at most; the largest vocabularies in use stay below 20 MiB."""


MAX_NAME = 256


_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


_DTYPES = {kind: np.dtype(code) for kind, code in _SCALARS.items()}


_STOP_TEXTS = (b"<|im_end|>", b"<|eot_id|>", b"<|eom_id|>", b"<|end|>", b"<end_of_turn>", b"<|endoftext|>", b"</s>")


@dataclass(frozen=True, slots=True)
class Field:
    """One metadata entry.

    Attributes:
        kind: The type it is stored as; for an array, `item_kind` is that of its items.
        value: int, float, bool or bytes; for an array a list of bytes or a numpy array.
        start: Where the entry begins in the file, key included; `end` is where it ends.
    """

    kind: GGUFValueType
    item_kind: GGUFValueType | None
    value: Any
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies.

    Attributes:
        shape: Sizes in GGUF's order, the fastest-running one first.
        kind: How its numbers are stored.
        offset: Bytes from the start of the data section; `size` is its length in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """Everything in a GGUF file but the weights.

    Attributes:
        path: The file.
        size: Its length in bytes.
        version: Of the GGUF format.
        fields: The metadata by key, in the file's order.
        tensors: The tensors by name, in the file's order.
        alignment: Of tensors in the data section, in bytes.
        data_start: Where the data section begins.
    """

    path: Path
    size: int
    version: int
    fields: Mapping[str, Field] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)
    alignment: int
    data_start: int

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata entry, or the default where there is none. `{arch}` in the key is filled in."""
        found = self.fields.get(key.replace("{arch}", self.architecture) if "{arch}" in key else key)
        return default if found is None else found.value

    def text(self, key: str) -> str | None:
        """A metadata entry as text; None where there is none, or it is no string."""
        value = self.get(key)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else None

    def token_id(self, key: str) -> int | None:
        """A metadata entry as the id of a token; None where there is none in the vocabulary."""
        value = self.get(key)
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    @cached_property
    def architecture(self) -> str:
        """Name of the model family, such as "llama"."""
        return self.text(Keys.General.ARCHITECTURE) or ""

    @cached_property
    def name(self) -> str | None:
        """The name that the model's makers gave it."""
        return self.text(Keys.General.NAME)

    @cached_property
    def context_length(self) -> int:
        """Tokens that the model was trained to look back on; 0 where the file does not say."""
        value = self.get(Keys.LLM.CONTEXT_LENGTH)
        return value if isinstance(value, int) else 0

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja template that turns messages into a prompt."""
        return self.text(Keys.Tokenizer.CHAT_TEMPLATE)

    @cached_property
    def tokenizer(self) -> str:
        """Kind of tokenizer: "gpt2" (byte-level BPE), "llama" (SentencePiece) or another that does not load."""
        return self.text(Keys.Tokenizer.MODEL) or ""

    @cached_property
    def pre_tokenizer(self) -> str | None:
        """Name of the rule that cuts text into words before BPE, such as "smollm"."""
        return self.text(Keys.Tokenizer.PRE)

    @cached_property
    def tokens(self) -> list[bytes]:
        """The vocabulary as stored; in a prepared file a "gpt2" token is the raw bytes that it stands for."""
        value = self.get(Keys.Tokenizer.LIST)
        return value if isinstance(value, list) else []

    @cached_property
    def token_types(self) -> list[int]:
        """A `gguf.TokenType` for each token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
        value = self.get(Keys.Tokenizer.TOKEN_TYPE)
        return value.tolist() if isinstance(value, np.ndarray) else []

    @cached_property
    def merges(self) -> list[tuple[bytes, bytes]]:
        """BPE merges of a prepared file, the highest rank first, both halves as the raw bytes of tokens.

        For a tokenizer of one's own: the engine's reads past its vocabulary at bytes that have no token (in SmolLM2
        0x04, 0x06, 0x13, 0x14, 0x16, 0x1d, 0xf1 and 0xf2), and overflows the stack at a run of 200,000 letters. Either
        ends the process with SIGSEGV, so no user's text may reach it unguarded.
        """
        value = self.get(Keys.Tokenizer.MERGES)
        pairs = []
        for merge in value if isinstance(value, list) else []:
            gap = merge.find(b" ", 1)
            # The engine looks merges up with these two characters in place of space and newline.
            left, right = (half.replace(b"\xc4\xa0", b" ").replace(b"\xc4\x8a", b"\n") for half in _split(merge, gap))
            pairs.append((left, right))
        return pairs

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text."""
        return self.token_id(Keys.Tokenizer.BOS_ID)

    @cached_property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text."""
        return self.token_id(Keys.Tokenizer.EOS_ID)

    @cached_property
    def eot_id(self) -> int | None:
        """Id of the token that ends a turn, where it is named apart from `eos_id`."""
        return self.token_id(Keys.Tokenizer.EOT_ID)

    @cached_property
    def add_bos(self) -> bool:
        """Whether a prompt starts with `bos_id`; what SentencePiece models do unless they say otherwise."""
        return bool(self.get(Keys.Tokenizer.ADD_BOS, self.tokenizer == "llama"))

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids of all tokens after which an answer is over: those named, and control tokens of well-known names."""
        keys = (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
        named = {token_id for key in keys if (token_id := self.token_id(key)) is not None}
        known = {i for i, kind in enumerate(self.token_types) if kind == 3 and self.tokens[i] in _STOP_TEXTS}
        return frozenset(named | known)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads the header, and checks that every tensor lies whole within the file.

    Says nothing about whether the engine can load the model: that is `supported.check`.

    Args:
        path: A file of any content; it may be torn or hostile.

    Raises:
        ModelFileError: No such file, not a GGUF file, torn, or damaged.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a named pipe would wait here for ever
            raise ModelFileError(f"{path} is not a file. Name a .gguf file.")
        with path.open("rb") as file:
            return _Reader(file, path).header()
    except FileNotFoundError:
        raise ModelFileError(f"There is no file {path}.") from None
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise ModelFileError(f"{path} cannot be read: {reason}.") from None


def _split(merge: bytes, gap: int) -> tuple[bytes, bytes]:
    return (merge[:gap], merge[gap + 1 :]) if gap > 0 else (merge, b"")


class _Reader:
    """Walks through one file; every length it meets is held against what is left of the file first."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0

    def header(self) -> Header:
        version = self.version()
        tensor_count, field_count = self.number("<Q"), self.number("<Q")
        fields: dict[str, Field] = {}
        for _ in range(field_count):
            start, key, kind = self.at, self.name(), self.kind()
            if key in fields:
                raise self.damaged(f"the entry {key} comes twice")
            item_kind, value = self.value(kind)
            fields[key] = Field(kind, item_kind, value, start, self.at)
        infos = [self.tensor() for _ in range(tensor_count)]
        alignment = fields[Keys.General.ALIGNMENT].value if Keys.General.ALIGNMENT in fields else 32
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**16 or alignment & (alignment - 1):
            raise self.damaged("its alignment is not a power of two")
        data_start = self.at + -self.at % alignment
        tensors: dict[str, Tensor] = {}
        for tensor in infos:
            if tensor.name in tensors:
                raise self.damaged(f"the tensor {tensor.name} comes twice")
            if tensor.offset % alignment:
                raise self.damaged(f"the tensor {tensor.name} is not aligned")
            if data_start + tensor.offset + tensor.size > self.size:
                raise self.torn(f"the tensor {tensor.name} ends at byte {data_start + tensor.offset + tensor.size:,}")
            tensors[tensor.name] = tensor
        return Header(self.path, self.size, version, fields, tensors, alignment, data_start)

    def version(self) -> int:
        magic = self.file.read(4)
        if magic != b"GGUF":
            raise ModelFileError(f"{self.path} is not a GGUF file{self.resembles(magic)}. Name a .gguf file.")
        self.at = 4
        version = self.number("<I")
        if version and version % 2**16 == 0:
            raise ModelFileError(
                f"{self.path} is a big-endian GGUF file, and the local engine reads little-endian ones. "
                "Turn it with `gguf-convert-endian FILE little` (in the gguf package)."
            )
        if version not in (2, 3):
            raise ModelFileError(
                f"{self.path} is GGUF version {version}; versions 2 and 3 can be read. "
                "Make it anew with a current llama.cpp, or download a newer file."
            )
        return version

    def resembles(self, magic: bytes) -> str:
        if magic in (b"tjgg", b"lmgg", b"algg", b"fmgg"):
            return " but one of the older GGML formats"
        if magic == b"vers":
            return " but a Git LFS pointer: `git lfs pull` fetches the model itself"
        return "" if magic else ", it is empty"

    def tensor(self) -> Tensor:
        name = self.name()
        dimensions = self.number("<I")
        if not 1 <= dimensions <= 4:
            raise self.damaged(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))
        number, offset = self.number("<I"), self.number("<Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelFileError(
                f"{self.path}: the tensor {name} has an unknown quantisation, number {number}."
            ) from None
        block, size = GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[0] % block:
            raise self.damaged(f"the tensor {name} has a shape that {kind.name} cannot have")
        return Tensor(name, shape, kind, offset, prod(shape) // block * size)

    def value(self, kind: GGUFValueType) -> tuple[GGUFValueType | None, Any]:
        if kind is GGUFValueType.STRING:
            return None, self.string()
        if kind is not GGUFValueType.ARRAY:
            dtype = _DTYPES[kind]
            return None, np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        item_kind, count = self.kind(), self.number("<Q")
        if item_kind is GGUFValueType.STRING:
            self.expect(8 * count)
            return item_kind, [self.string() for _ in range(count)]
        if item_kind is GGUFValueType.ARRAY:
            raise ModelFileError(f"{self.path} holds arrays of arrays, which the local engine cannot read.")
        dtype = _DTYPES[item_kind]
        return item_kind, np.frombuffer(self.take(dtype.itemsize * count), dtype)

    def kind(self) -> GGUFValueType:
        number = self.number("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.damaged(f"it has an entry of unknown type {number}") from None

    def name(self) -> str:
        text = self.string().decode("utf-8", "replace")
        if not text.isprintable() or len(text) > MAX_NAME:  # names end up in messages
            raise self.damaged("a name in it is none")
        return text

    def string(self) -> bytes:
        return self.take(self.number("<Q"))

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def take(self, length: int) -> bytes:
        self.expect(length)
        data = self.file.read(length)
        self.at += len(data)
        if len(data) != length:
            raise self.torn("it got shorter while it was read")
        return data

    def expect(self, length: int) -> None:
        if self.at + length > self.size:
            raise self.torn("it ends within its header")
        if self.at + length > MAX_HEADER:
            raise self.damaged(f"its header is larger than {MAX_HEADER >> 20} MiB")

    def torn(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path} is cut off: {what}, but the file has {self.size:,} bytes. Download it again."
        )

    def damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is damaged: {what}. Download it again.")
