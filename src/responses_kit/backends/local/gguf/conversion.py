"""Rewrites the header of a modern llama GGUF file into the form that the engine of 2023 reads.

Four things differ. The version is written as 2: the layout is the same. The engine wants a score for each token. It
wants "gpt2" tokens as the raw bytes that they stand for, not in GPT-2's printable spelling of bytes; it looks merges
up by raw bytes too, but with Ġ and Ċ for space and newline. It wants an output matrix, which models that share theirs
with the embeddings leave out: here both names point to the same bytes, so neither disk nor memory holds them twice.
All the rest, the weights above all, is copied byte for byte.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGUFValueType, Keys

from ..cache import Progress, new_file
from ..errors import ModelFileError
from .header import Field, Header, Tensor

__all__ = ["SPELLING", "convert", "key_of", "needs_conversion"]

VERSION = 1
"""Part of the name of every converted file; raise it when the outcome changes, and files are made anew."""

_CHUNK = 1 << 20
_NORMAL = 1
_SPACE, _NEWLINE = "Ġ".encode(), "Ċ".encode()


def _spelling() -> dict[int, str]:
    """GPT-2's printable characters for bytes, to the byte that each stands for (as a latin-1 character)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {0x100 + i: chr(byte) for i, byte in enumerate(others)}


SPELLING = _spelling()
"""The byte that each of GPT-2's printable characters stands for."""


def needs_conversion(header: Header) -> bool:
    """Whether the engine can load the file only after `convert`."""
    return (
        header.version != 2
        or Keys.Tokenizer.SCORES not in header.fields
        or "output.weight" not in header.tensors
        or _is_spelled(header)
    )


def key_of(path: Path) -> str:
    """Names this state of a user's file: where it is, how long, and when it was last written.

    Hashing the contents instead would read gigabytes at every start, to learn that nothing has changed.
    """
    path = path.resolve()
    status = path.stat()
    return hashlib.sha256(
        f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogatepass")
    ).hexdigest()


def convert(header: Header, target: Path, progress: Progress) -> None:
    """Writes a model to `target` in the form that the engine loads; the weights stream through, a MiB at a time.

    Args:
        header: Of the model's file, which `supported.check` has accepted.
        target: Appears when it is whole; hold the cache's lock meanwhile.
        progress: Told the bytes written.

    Raises:
        ModelFileError: The file is damaged, or the cache cannot be written.
    """
    end = header.data_start + max(tensor.offset + tensor.size for tensor in header.tensors.values())
    with header.path.open("rb") as source:
        head = _head(header, source)
        total = len(head) + end - header.data_start
        with new_file(target) as file:
            file.write(head)
            for done in _copy(source, header.data_start, end, file):
                progress("converting the model", len(head) + done, total)


def _copy(source: BinaryIO, start: int, end: int, file: BinaryIO) -> Iterable[int]:
    source.seek(start)
    left = end - start
    while left:
        chunk = _read(source, min(left, _CHUNK))
        file.write(chunk)
        left -= len(chunk)
        yield end - start - left


def _read(source: BinaryIO, length: int) -> bytes:
    try:
        data = source.read(length)
    except OSError as problem:  # not to be taken for the cache's trouble
        raise ModelFileError(f"{source.name} cannot be read: {problem.strerror}.") from None
    if not data:
        raise ModelFileError(f"{source.name} got shorter while it was read. Download it again.")
    return data


def _head(header: Header, source: BinaryIO) -> bytes:
    tensors = dict(header.tensors)
    if "output.weight" not in tensors:
        shared = tensors["token_embd.weight"]
        tensors["output.weight"] = Tensor("output.weight", shared.shape, shared.kind, shared.offset, shared.size)
    entries = [_entry(header, key, field, source) for key, field in header.fields.items()]
    if Keys.Tokenizer.SCORES not in header.fields:
        scores = -np.arange(len(header.tokens), dtype="<f4")
        entries.append(_array(Keys.Tokenizer.SCORES, GGUFValueType.FLOAT32, len(scores), scores.tobytes()))
    head = b"GGUF" + struct.pack("<IQQ", 2, len(tensors), len(entries)) + b"".join(entries)
    head += b"".join(_info(tensor) for tensor in tensors.values())
    return head + bytes(-len(head) % header.alignment)


def _entry(header: Header, key: str, field: Field, source: BinaryIO) -> bytes:
    if key == Keys.Tokenizer.LIST and _is_spelled(header):
        pairs = zip(header.tokens, header.token_types, strict=True)
        return _strings(key, [_raw(token) if kind == _NORMAL else token for token, kind in pairs])
    if key == Keys.Tokenizer.MERGES and _is_spelled(header):
        return _strings(key, [_merge(merge) for merge in field.value])
    source.seek(field.start)
    return _read(source, field.end - field.start)


def _is_spelled(header: Header) -> bool:
    """Whether tokens are in GPT-2's spelling: then Ġ stands for the space that so many tokens begin with."""
    if header.tokenizer != "gpt2":
        return False
    # The more frequent one decides: Ġ is a letter of Maltese, and tokens with spaces may have been added by hand.
    return sum(t.startswith(_SPACE) for t in header.tokens) > sum(t.startswith(b" ") for t in header.tokens)


def _raw(spelled: bytes) -> bytes:
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        raise ModelFileError("The vocabulary of the model's file is damaged. Download it again.") from None
    try:
        return text.translate(SPELLING).encode("latin-1")
    except UnicodeEncodeError:  # a character outside the spelling stands for itself
        return b"".join(SPELLING[ord(c)].encode("latin-1") if ord(c) in SPELLING else c.encode() for c in text)


def _merge(merge: bytes) -> bytes:
    left, gap, right = merge[1:].partition(b" ")
    halves = (merge[:1] + left, right) if gap else (merge,)
    return b" ".join(_raw(half).replace(b" ", _SPACE).replace(b"\n", _NEWLINE) for half in halves)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _array(key: str, kind: GGUFValueType, count: int, data: bytes) -> bytes:
    return _string(key.encode()) + struct.pack("<IIQ", GGUFValueType.ARRAY, kind, count) + data


def _strings(key: str, texts: list[bytes]) -> bytes:
    return _array(key, GGUFValueType.STRING, len(texts), b"".join(map(_string, texts)))


def _info(tensor: Tensor) -> bytes:
    dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return _string(tensor.name.encode()) + dimensions + struct.pack("<IQ", tensor.kind, tensor.offset)
