"""Conversion of a modern llama GGUF file to the form that the engine of 2023 reads.

The forms differ in four ways:

- The version is 2 instead of 3; the layout is the same.
- The engine needs a score for each token.
- The engine needs "gpt2" tokens as raw bytes, not in GPT-2's printable encoding of bytes. It looks up merges by raw
  bytes, too, but with Ġ and Ċ in place of space and newline.
- The engine needs an output matrix, which models with tied embeddings omit. The converted header has a second name for
  the bytes of the embeddings, so neither disk nor memory holds them twice.

Everything else, including the weights, is copied byte for byte.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGUFValueType, Keys

from ..cache import Progress, write_atomically
from ..errors import ModelFileError
from .header import Field, Header, Tensor

__all__ = ["GPT2_BYTE_DECODER", "convert", "file_fingerprint", "is_conversion_required"]

CONVERSION_VERSION = 1
"""The version of the conversion, part of each converted file's name. Increment it to convert all models again."""

_CHUNK_BYTES = 1 << 20
"""Bytes that are copied at a time."""

_NORMAL = 1
_SPACE, _NEWLINE = "Ġ".encode(), "Ċ".encode()


def _gpt2_byte_decoder() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {0x100 + i: chr(byte) for i, byte in enumerate(unprintable)}


GPT2_BYTE_DECODER = _gpt2_byte_decoder()
"""The byte, as a latin-1 character, that each code point in GPT-2's printable encoding of bytes stands for."""


def is_conversion_required(header: Header) -> bool:
    """Return whether the engine can load the file only after `convert`."""
    return (
        header.version != 2
        or Keys.Tokenizer.SCORES not in header.fields
        or "output.weight" not in header.tensors
        or _is_byte_encoded(header)
    )


def file_fingerprint(path: Path) -> str:
    """Return an identifier for the current state of a user's file, from its path, length and modification time.

    A hash of the content would read gigabytes at every start.
    """
    path = path.resolve()
    status = path.stat()
    return hashlib.sha256(
        f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogatepass")
    ).hexdigest()


def convert(header: Header, target: Path, progress: Progress) -> None:
    """Write a model to `target` in the form that the engine loads, without holding the weights in memory.

    Args:
        header: The header of the model's file, which `support.check_supported` has accepted.
        target: The file to write; it appears when it is complete. The caller holds the cache's lock.
        progress: Receives the progress.

    Raises:
        ModelFileError: The file is damaged, or the cache cannot be written.
    """
    end = header.data_start + max(tensor.offset + tensor.size for tensor in header.tensors.values())
    with header.path.open("rb") as source:
        converted = _convert_header(header, source)
        total = len(converted) + end - header.data_start
        with write_atomically(target) as file:
            file.write(converted)
            for done in _copy(source, header.data_start, end, file):
                progress("converting the model", len(converted) + done, total)


def _copy(source: BinaryIO, start: int, end: int, file: BinaryIO) -> Iterable[int]:
    source.seek(start)
    remaining = end - start
    while remaining:
        chunk = _read(source, min(remaining, _CHUNK_BYTES))
        file.write(chunk)
        remaining -= len(chunk)
        yield end - start - remaining


def _read(source: BinaryIO, length: int) -> bytes:
    try:
        data = source.read(length)
    except OSError as error:  # otherwise `write_atomically` would blame the cache
        raise ModelFileError(f"{source.name} cannot be read: {error.strerror}.") from None
    if not data:
        raise ModelFileError(f"{source.name} became shorter while it was read. Download it again.")
    return data


def _convert_header(header: Header, source: BinaryIO) -> bytes:
    tensors = dict(header.tensors)
    if "output.weight" not in tensors:
        tied = tensors["token_embd.weight"]
        tensors["output.weight"] = Tensor("output.weight", tied.shape, tied.quantization, tied.offset, tied.size)
    entries = [_convert_entry(header, key, field, source) for key, field in header.fields.items()]
    if Keys.Tokenizer.SCORES not in header.fields:
        scores = -np.arange(len(header.tokens), dtype="<f4")
        entries.append(_encode_array(Keys.Tokenizer.SCORES, GGUFValueType.FLOAT32, len(scores), scores.tobytes()))
    converted = b"GGUF" + struct.pack("<IQQ", 2, len(tensors), len(entries)) + b"".join(entries)
    converted += b"".join(_encode_tensor(tensor) for tensor in tensors.values())
    return converted + bytes(-len(converted) % header.alignment)


def _convert_entry(header: Header, key: str, field: Field, source: BinaryIO) -> bytes:
    if key == Keys.Tokenizer.LIST and _is_byte_encoded(header):
        pairs = zip(header.tokens, header.token_types, strict=True)
        return _encode_strings(key, [_decode_token(token) if kind == _NORMAL else token for token, kind in pairs])
    if key == Keys.Tokenizer.MERGES and _is_byte_encoded(header):
        return _encode_strings(key, [_convert_merge(merge) for merge in field.value])
    source.seek(field.start)
    return _read(source, field.end - field.start)


def _is_byte_encoded(header: Header) -> bool:
    """Return whether tokens are in GPT-2's printable encoding, in which Ġ stands for a space."""
    if header.tokenizer != "gpt2":
        return False
    # The more frequent prefix decides: Ġ is a letter of Maltese, and a vocabulary may contain added tokens with spaces.
    return sum(t.startswith(_SPACE) for t in header.tokens) > sum(t.startswith(b" ") for t in header.tokens)


def _decode_token(token: bytes) -> bytes:
    try:
        text = token.decode()
    except UnicodeDecodeError:
        raise ModelFileError(
            "The model file is damaged: its vocabulary is not valid UTF-8. Download it again."
        ) from None
    try:
        return text.translate(GPT2_BYTE_DECODER).encode("latin-1")
    except UnicodeEncodeError:  # a character outside the encoding stands for itself
        return b"".join(
            GPT2_BYTE_DECODER[ord(c)].encode("latin-1") if ord(c) in GPT2_BYTE_DECODER else c.encode() for c in text
        )


def _convert_merge(merge: bytes) -> bytes:
    left, gap, right = merge[1:].partition(b" ")
    halves = (merge[:1] + left, right) if gap else (merge,)
    return b" ".join(_decode_token(half).replace(b" ", _SPACE).replace(b"\n", _NEWLINE) for half in halves)


def _encode_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _encode_array(key: str, item_type: GGUFValueType, count: int, data: bytes) -> bytes:
    return _encode_string(key.encode()) + struct.pack("<IIQ", GGUFValueType.ARRAY, item_type, count) + data


def _encode_strings(key: str, texts: list[bytes]) -> bytes:
    return _encode_array(key, GGUFValueType.STRING, len(texts), b"".join(map(_encode_string, texts)))


def _encode_tensor(tensor: Tensor) -> bytes:
    dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return _encode_string(tensor.name.encode()) + dimensions + struct.pack("<IQ", tensor.quantization, tensor.offset)
