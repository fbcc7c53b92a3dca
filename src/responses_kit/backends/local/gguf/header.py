"""A reader for headers of GGUF files that validates everything it reads.

`gguf.GGUFReader` is not used: it builds one numpy array per string, which takes two seconds for a vocabulary of 49,152
tokens, against 0.1 seconds here, and it raises `IndexError` for a truncated file. The package's tables of types are
used.
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

MAX_HEADER_BYTES = 64 * 2**20
"""Bytes of metadata above which a file is refused; the largest vocabularies in use stay below 20 MiB."""

MAX_NAME_LENGTH = 256
"""Characters of a key or tensor name above which a file is refused."""

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

_DTYPES = {value_type: np.dtype(code) for value_type, code in _SCALARS.items()}

_STOP_TOKENS = (b"<|im_end|>", b"<|eot_id|>", b"<|eom_id|>", b"<|end|>", b"<end_of_turn>", b"<|endoftext|>", b"</s>")
"""Control tokens that end an answer, whether or not the metadata names them."""


@dataclass(frozen=True, slots=True)
class Field:
    """One metadata entry.

    Attributes:
        value_type: The stored type.
        item_type: The type of an array's items, or None for other entries.
        value: An int, float, bool or bytes; an array is a list of bytes or a numpy array.
        start: The offset of the entry in the file, key included.
        end: The offset behind the entry.
    """

    value_type: GGUFValueType
    item_type: GGUFValueType | None
    value: Any
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """The description of one tensor.

    Attributes:
        name: Its name.
        shape: Its dimensions in GGUF's order, the fastest-varying first.
        quantization: The storage type of its numbers.
        offset: Its offset from the start of the data section, in bytes.
        size: Its length in bytes.
    """

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """The content of a GGUF file, without the weights.

    Attributes:
        path: The file.
        size: The file's length in bytes.
        version: The version of the GGUF format.
        fields: The metadata by key, in the file's order.
        tensors: The tensors by name, in the file's order.
        alignment: The alignment of tensors in the data section, in bytes.
        data_start: The offset of the data section.
    """

    path: Path
    size: int
    version: int
    fields: Mapping[str, Field] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)
    alignment: int
    data_start: int

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata entry, or the default if there is none.

        Args:
            key: The entry's key; `{arch}` in it stands for the architecture.
            default: The value for a missing entry.
        """
        entry = self.fields.get(key.replace("{arch}", self.architecture) if "{arch}" in key else key)
        return default if entry is None else entry.value

    def get_text(self, key: str) -> str | None:
        """Return a metadata entry as text, or None if it is missing or not a string."""
        value = self.get(key)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else None

    def get_token_id(self, key: str) -> int | None:
        """Return a metadata entry as a token id, or None if it is missing or not in the vocabulary."""
        value = self.get(key)
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    @cached_property
    def architecture(self) -> str:
        """The model's architecture, such as "llama"."""
        return self.get_text(Keys.General.ARCHITECTURE) or ""

    @cached_property
    def name(self) -> str | None:
        """The name that the model's authors gave it."""
        return self.get_text(Keys.General.NAME)

    @cached_property
    def context_length(self) -> int:
        """The context length that the model was trained for, in tokens; 0 if the file does not contain it."""
        value = self.get(Keys.LLM.CONTEXT_LENGTH)
        return value if isinstance(value, int) else 0

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja template that renders messages to a prompt."""
        return self.get_text(Keys.Tokenizer.CHAT_TEMPLATE)

    @cached_property
    def tokenizer(self) -> str:
        """The kind of tokenizer: "gpt2" (byte-level BPE), "llama" (SentencePiece), or one that is not supported."""
        return self.get_text(Keys.Tokenizer.MODEL) or ""

    @cached_property
    def pre_tokenizer(self) -> str | None:
        """The name of the rule that splits text into words before BPE, such as "smollm"."""
        return self.get_text(Keys.Tokenizer.PRE)

    @cached_property
    def tokens(self) -> list[bytes]:
        """The vocabulary as stored. In a converted file, a "gpt2" token is its raw bytes."""
        value = self.get(Keys.Tokenizer.LIST)
        return value if isinstance(value, list) else []

    @cached_property
    def token_types(self) -> list[int]:
        """The `gguf.TokenType` of each token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
        value = self.get(Keys.Tokenizer.TOKEN_TYPE)
        return value.tolist() if isinstance(value, np.ndarray) else []

    @cached_property
    def merges(self) -> list[tuple[bytes, bytes]]:
        """The BPE merges of a converted file, the highest rank first, both halves as raw bytes of tokens.

        They serve `inference.tokenizer`. The engine's own tokenizer must not see a user's text: it reads past its
        vocabulary at bytes without a token (in SmolLM2 0x04, 0x06, 0x13, 0x14, 0x16, 0x1d, 0xf1 and 0xf2), and
        overflows the stack at a run of 200,000 letters. Both kill the process with SIGSEGV.
        """
        value = self.get(Keys.Tokenizer.MERGES)
        pairs = []
        for merge in value if isinstance(value, list) else []:
            gap = merge.find(b" ", 1)
            # The engine looks up merges with these two characters in place of space and newline.
            left, right = (
                half.replace(b"\xc4\xa0", b" ").replace(b"\xc4\x8a", b"\n") for half in _split_merge(merge, gap)
            )
            pairs.append((left, right))
        return pairs

    @cached_property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text."""
        return self.get_token_id(Keys.Tokenizer.BOS_ID)

    @cached_property
    def eos_id(self) -> int | None:
        """The id of the token that ends a text."""
        return self.get_token_id(Keys.Tokenizer.EOS_ID)

    @cached_property
    def eot_id(self) -> int | None:
        """The id of the token that ends a message, if it differs from `eos_id`."""
        return self.get_token_id(Keys.Tokenizer.EOT_ID)

    @cached_property
    def add_bos(self) -> bool:
        """Whether a prompt starts with `bos_id`; by default True for SentencePiece models only."""
        return bool(self.get(Keys.Tokenizer.ADD_BOS, self.tokenizer == "llama"))

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids of tokens that end an answer: those in the metadata, and control tokens with well-known names."""
        keys = (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
        named = {token_id for key in keys if (token_id := self.get_token_id(key)) is not None}
        known = {i for i, kind in enumerate(self.token_types) if kind == 3 and self.tokens[i] in _STOP_TOKENS}
        return frozenset(named | known)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a GGUF file, and check that every tensor lies within the file.

    `support.check_supported` decides whether the engine can load the model.

    Args:
        path: A file with any content; it may be truncated or hostile.

    Raises:
        ModelFileError: The file is missing, not a GGUF file, truncated or damaged.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would block
            raise ModelFileError(f"{path} is not a regular file. Pass the path of a .gguf file.")
        with path.open("rb") as file:
            return _HeaderParser(file, path).parse()
    except FileNotFoundError:
        raise ModelFileError(f"There is no file {path}. Check the path.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"{path} cannot be read: {reason}.") from None


def _split_merge(merge: bytes, gap: int) -> tuple[bytes, bytes]:
    return (merge[:gap], merge[gap + 1 :]) if gap > 0 else (merge, b"")


class _HeaderParser:
    """A parser that checks every length against the rest of the file before it allocates memory."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0

    def parse(self) -> Header:
        version = self._read_version()
        tensor_count, field_count = self._read_number("<Q"), self._read_number("<Q")
        fields: dict[str, Field] = {}
        for _ in range(field_count):
            start, key, value_type = self.position, self._read_name(), self._read_type()
            if key in fields:
                raise self._damaged(f"the metadata entry {key} occurs twice")
            item_type, value = self._read_value(value_type)
            fields[key] = Field(value_type, item_type, value, start, self.position)
        infos = [self._read_tensor() for _ in range(tensor_count)]
        alignment = fields[Keys.General.ALIGNMENT].value if Keys.General.ALIGNMENT in fields else 32
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**16 or alignment & (alignment - 1):
            raise self._damaged(f"{Keys.General.ALIGNMENT} is not a power of two")
        data_start = self.position + -self.position % alignment
        tensors: dict[str, Tensor] = {}
        for tensor in infos:
            if tensor.name in tensors:
                raise self._damaged(f"the tensor {tensor.name} occurs twice")
            if tensor.offset % alignment:
                raise self._damaged(f"the tensor {tensor.name} is not aligned")
            end = data_start + tensor.offset + tensor.size
            if end > self.size:
                raise self._truncated(f"the tensor {tensor.name} ends at byte {end:,}")
            tensors[tensor.name] = tensor
        return Header(self.path, self.size, version, fields, tensors, alignment, data_start)

    def _read_version(self) -> int:
        magic = self.file.read(4)
        if magic != b"GGUF":
            raise ModelFileError(
                f"{self.path} is not a GGUF file{_describe_magic(magic)}. Pass the path of a .gguf file."
            )
        self.position = 4
        version = self._read_number("<I")
        if version and version % 2**16 == 0:
            raise ModelFileError(
                f"{self.path} is a big-endian GGUF file, but the local engine reads only little-endian ones. "
                "Convert it with `gguf-convert-endian FILE little` from the gguf package."
            )
        if version not in (2, 3):
            raise ModelFileError(
                f"{self.path} has version {version} of the GGUF format; versions 2 and 3 are supported. "
                "Download a newer file of this model, or convert the model again with a current llama.cpp."
            )
        return version

    def _read_tensor(self) -> Tensor:
        name = self._read_name()
        dimensions = self._read_number("<I")
        if not 1 <= dimensions <= 4:
            raise self._damaged(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(self._read_number("<Q") for _ in range(dimensions))
        number, offset = self._read_number("<I"), self._read_number("<Q")
        try:
            quantization = GGMLQuantizationType(number)
        except ValueError:
            raise ModelFileError(
                f"{self.path} cannot be loaded: the tensor {name} has an unknown quantization, number {number}. "
                "Choose a file with another quantization, such as Q4_K_M or Q8_0."
            ) from None
        block, size = GGML_QUANT_SIZES[quantization]
        if not all(shape) or shape[0] % block:
            raise self._damaged(f"the tensor {name} has a shape that is invalid for {quantization.name}")
        return Tensor(name, shape, quantization, offset, prod(shape) // block * size)

    def _read_value(self, value_type: GGUFValueType) -> tuple[GGUFValueType | None, Any]:
        if value_type is GGUFValueType.STRING:
            return None, self._read_string()
        if value_type is not GGUFValueType.ARRAY:
            dtype = _DTYPES[value_type]
            return None, np.frombuffer(self._read_bytes(dtype.itemsize), dtype)[0].item()
        item_type, count = self._read_type(), self._read_number("<Q")
        if item_type is GGUFValueType.STRING:
            self._check_length(8 * count)
            return item_type, [self._read_string() for _ in range(count)]
        if item_type is GGUFValueType.ARRAY:
            raise ModelFileError(
                f"{self.path} contains nested arrays, which the local engine cannot read. Choose another file of this "
                "model."
            )
        dtype = _DTYPES[item_type]
        return item_type, np.frombuffer(self._read_bytes(dtype.itemsize * count), dtype)

    def _read_type(self) -> GGUFValueType:
        number = self._read_number("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._damaged(f"a metadata entry has the unknown type {number}") from None

    def _read_name(self) -> str:
        text = self._read_string().decode("utf-8", "replace")
        if not text.isprintable() or len(text) > MAX_NAME_LENGTH:  # error messages contain names
            raise self._damaged("it contains an invalid name")
        return text

    def _read_string(self) -> bytes:
        return self._read_bytes(self._read_number("<Q"))

    def _read_number(self, form: str) -> int:
        value: int = struct.unpack(form, self._read_bytes(struct.calcsize(form)))[0]
        return value

    def _read_bytes(self, length: int) -> bytes:
        self._check_length(length)
        data = self.file.read(length)
        self.position += len(data)
        if len(data) != length:
            raise self._truncated("it became shorter while it was read")
        return data

    def _check_length(self, length: int) -> None:
        if self.position + length > self.size:
            raise self._truncated("it ends within its header")
        if self.position + length > MAX_HEADER_BYTES:
            raise self._damaged(f"its header is larger than {MAX_HEADER_BYTES >> 20} MiB")

    def _truncated(self, reason: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path} is truncated: {reason}, but the file has {self.size:,} bytes. Download it again."
        )

    def _damaged(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is damaged: {reason}. Download it again.")


def _describe_magic(magic: bytes) -> str:
    """Return the rest of a sentence that identifies a file by its first bytes, or an empty string."""
    if magic in (b"tjgg", b"lmgg", b"algg", b"fmgg"):
        return " but has one of the older GGML formats"
    if magic == b"vers":
        return " but a Git LFS pointer; run `git lfs pull` to download the model"
    return "" if magic else ", because it is empty"
