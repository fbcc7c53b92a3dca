"""Reading of headers, and refusal of unsupported, damaged and hostile files."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from responses_kit import errors
from responses_kit.backends.local.errors import ModelFileError
from responses_kit.backends.local.gguf import header
from responses_kit.backends.local.gguf.header import read_header
from responses_kit.backends.local.gguf.support import SUPPORTED_QUANTIZATIONS, check_supported

from .tiny import MERGES, TOKENS, WIDTH, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def refusal(path: Path, *, is_final: bool = False) -> str:
    """Return the error message of a file that is refused."""
    with pytest.raises(ModelFileError) as caught:
        check_supported(read_header(path), is_final=is_final)
    assert isinstance(caught.value, errors.ConfigurationError)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_header_holds_engine_metadata(tiny: Path):
    header = read_header(tiny)
    check_supported(header, is_final=False)
    assert (header.architecture, header.name, header.context_length) == ("llama", "Tiny", 64)
    assert (header.tokenizer, header.bos_id, header.eos_id, header.eot_id) == ("gpt2", 14, 15, None)
    assert header.tokens == [text.encode() for text in TOKENS]
    assert header.token_types == [1] * 14 + [3] * 2
    assert header.stop_ids == {15}
    assert header.chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert not header.add_bos
    assert header.size == tiny.stat().st_size


def test_header_offsets_match_gguf_package(tiny: Path):
    ours, theirs = read_header(tiny), gguf.GGUFReader(tiny)
    assert list(ours.fields) == [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert [
        (t.name, list(t.shape), t.quantization, t.size, ours.data_start + t.offset) for t in ours.tensors.values()
    ] == [(t.name, t.shape.tolist(), t.tensor_type, t.n_bytes, t.data_offset) for t in theirs.tensors]


def test_sentencepiece_model_adds_bos_by_default(tmp_path: Path):
    assert read_header(write_tiny(tmp_path / "a.gguf", kind="llama")).add_bos


def test_missing_file_and_folder_are_reported(tmp_path: Path):
    assert "There is no file" in refusal(tmp_path / "none.gguf")
    assert "is not a regular file" in refusal(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_is_refused_immediately(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is not a regular file" in refusal(tmp_path / "pipe.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"tjgg\x03\x00\x00\x00", "older GGML"),
        (b"version https://example.org/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 of"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0 of"),
        (b"GGUF" + struct.pack("<IQQ", 77, 0, 0), "version 77 of"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 2**64 - 1), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "architecture ''"),
    ],
)
def test_unreadable_files_have_distinct_errors(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    assert message in refusal(path)


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (entry(b"a", 8, struct.pack("<Q", 2**63)), "truncated"),
        (entry(b"a", 9, struct.pack("<IQ", 8, 2**62)), "truncated"),
        (entry(b"a", 9, struct.pack("<IQ", 10, 2**61)), "truncated"),
        (entry(b"a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0)), "nested arrays"),
        (entry(b"a", 99, b""), "unknown type 99"),
        (entry(b"a", 4, bytes(4)) * 2, "occurs twice"),
        (entry(b"\x1b[2J", 4, bytes(4)), "invalid name"),
        (entry(b"x" * 300, 4, bytes(4)), "invalid name"),
        (entry(b"general.alignment", 4, struct.pack("<I", 0)), "power of two"),
        (entry(b"general.alignment", 4, struct.pack("<I", 2**31)), "power of two"),
        (entry(b"general.alignment", 8, struct.pack("<Q", 0)), "power of two"),
    ],
)
def test_hostile_entry_is_refused_cheaply(tmp_path: Path, body: bytes, message: str):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2 if "twice" in message else 1) + body)
    assert message in refusal(path)


def test_endless_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1 << 16)
    path = tmp_path / "large.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"a", 8, struct.pack("<Q", 1 << 30)))
        file.truncate(1 << 31)  # a sparse file, which occupies no disk space
    assert "its header is larger than" in refusal(path)


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return struct.pack(f"<Q{len(name)}sI{len(shape)}QIQ", len(name), name, len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([tensor(b"t", (), 0)], "0 dimensions"),
        ([tensor(b"t", (1, 1, 1, 1, 1), 0)], "5 dimensions"),
        ([tensor(b"t", (0,), 0)], "a shape that is invalid"),
        ([tensor(b"t", (31,), 2)], "a shape that is invalid"),
        ([tensor(b"t", (2**63, 2**63), 0)], "truncated"),
        ([tensor(b"t", (1,), 0, 2**63)], "truncated"),
        ([tensor(b"t", (1,), 0, 7)], "not aligned"),
        ([tensor(b"t", (1,), 0)] * 2, "occurs twice"),
        ([tensor(b"t", (32,), 4)], "unknown quantization, number 4"),
        ([tensor(b"t", (32,), 4_000_000)], "unknown quantization"),
    ],
)
def test_hostile_tensor_is_refused(tmp_path: Path, infos: list[bytes], message: str):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos) + bytes(64))
    assert message in refusal(path)


def test_file_truncated_anywhere_is_refused(tiny: Path, tmp_path: Path):
    whole = tiny.read_bytes()
    end = read_header(tiny).data_start
    path = tmp_path / "truncated.gguf"
    cuts = {*range(4, 200), *range(200, end, 7), end - 1, end, end + 1, (end + len(whole)) // 2}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        assert "truncated" in refusal(path), f"truncated at {cut} of {len(whole)}"
    last = max(t.offset + t.size for t in read_header(tiny).tensors.values())
    path.write_bytes(whole[: end + last - 1])
    assert "truncated" in refusal(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_file_with_changed_bytes_is_read_or_refused(tiny: Path, tmp_path: Path, data: st.DataObject):
    content = bytearray(tiny.read_bytes())
    end = read_header(tiny).data_start
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        piece = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), b"\0\0\0\x80"]))
        content[at : at + len(piece)] = piece
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelFileError):
        check_supported(read_header(path), is_final=False)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=600), tensors=st.sampled_from([0, 1, 5, 2**40]), fields=st.sampled_from([0, 3, 2**60]))
def test_noise_after_magic_is_refused(tmp_path: Path, noise: bytes, tensors: int, fields: int):
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + noise)
    refusal(path)


def test_empty_arrays_are_read(tmp_path: Path):
    path = tmp_path / "empty.gguf"
    arrays = entry(b"a", 9, struct.pack("<IQ", 4, 0)) + entry(b"b", 9, struct.pack("<IQ", 8, 0))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + arrays)
    header = read_header(path)
    assert (len(header.get("a")), header.get("b")) == (0, [])


def test_unknown_architecture_is_named_with_supported_ones(tmp_path: Path):
    message = refusal(write_tiny(tmp_path / "a.gguf", arch="qwen3"))
    assert "'qwen3'" in message
    assert "supports only llama" in message


@pytest.mark.parametrize("name", ["IQ4_XS", "IQ2_XXS", "TQ1_0", "BF16", "MXFP4", "Q8_1", "Q8_K", "F64"])
def test_unknown_quantization_is_named_with_tensor(tmp_path: Path, name: str):
    raw = {"blk.1.ffn_down.weight": gguf.GGMLQuantizationType[name]}
    message = refusal(write_tiny(tmp_path / "a.gguf", width=256, raw=raw))
    assert f"blk.1.ffn_down.weight is quantized as {name}" in message
    assert "Q4_K" in message


def test_every_supported_quantization_is_accepted(tmp_path: Path):
    for kind in SUPPORTED_QUANTIZATIONS:
        raw = {"blk.0.attn_q.weight": kind, "token_embd.weight": kind}
        check_supported(read_header(write_tiny(tmp_path / "a.gguf", width=256, raw=raw)), is_final=False)


def test_quantized_norm_is_refused(tmp_path: Path):
    message = refusal(write_tiny(tmp_path / "a.gguf", raw={"output_norm.weight": gguf.GGMLQuantizationType.F16}))
    assert "output_norm.weight is stored as F16" in message


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight"])
def test_unexpected_tensor_is_named(tmp_path: Path, name: str):
    assert f"'{name}'" in refusal(write_tiny(tmp_path / "a.gguf", tensors={name: (WIDTH,)}))


def test_missing_tensor_is_named(tmp_path: Path):
    message = refusal(write_tiny(tmp_path / "a.gguf", tensors={"blk.1.attn_v.weight": None}))
    assert "lacks the tensor blk.1.attn_v.weight" in message


def test_tensor_of_wrong_shape_is_named(tmp_path: Path):
    message = refusal(write_tiny(tmp_path / "a.gguf", tensors={"blk.0.attn_k.weight": (WIDTH, WIDTH)}))
    assert "blk.0.attn_k.weight has the shape (32, 32)" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' scaling"),
        ({"general.name": np.uint32(1)}, "general.name as UINT32"),
        ({"llama.rope.freq_base": np.uint32(10_000)}, "llama.rope.freq_base as UINT32"),
        ({"llama.context_length": None}, "llama.context_length"),
        ({"llama.context_length": "many"}, "llama.context_length"),
        ({"llama.embedding_length": np.uint32(0)}, "llama.embedding_length"),
        ({"llama.attention.head_count": np.uint32(5)}, "attention dimensions"),
        ({"llama.attention.head_count_kv": np.uint32(3)}, "attention dimensions"),
        ({"llama.rope.dimension_count": np.uint32(4)}, "attention dimensions"),
        ({"llama.block_count": np.uint32(2**32 - 1)}, "its 4294967295 layers"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon"),
        ({"tokenizer.ggml.token_type": None}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.token_type": np.array([1, 1], dtype=np.int32)}, "for each token"),
        ({"tokenizer.ggml.scores": np.array([1.0], dtype=np.float32)}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": ["x"] * len(TOKENS)}, "newline"),
        ({"tokenizer.ggml.eos_token_id": np.uint32(16)}, "eos_token_id is not the id"),
        ({"tokenizer.ggml.padding_token_id": np.uint32(2**32 - 1)}, "padding_token_id is not the id"),
        ({"tokenizer.ggml.tokens": None}, "for each token"),
        ({"tokenizer.ggml.tokens": "text"}, "for each token"),
    ],
)
def test_crashing_metadata_is_refused(tmp_path: Path, fields: dict[str, object], message: str):
    assert message in refusal(write_tiny(tmp_path / "a.gguf", fields=fields))


def test_sentencepiece_model_without_byte_tokens_is_refused(tmp_path: Path):
    tokens = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(257))]
    message = refusal(write_tiny(tmp_path / "a.gguf", kind="llama", fields={"tokenizer.ggml.tokens": tokens}))
    assert "single bytes" in message


def test_split_model_is_refused_with_merge_command(tmp_path: Path):
    assert "llama-gguf-split --merge" in refusal(write_tiny(tmp_path / "m-00001-of-00002.gguf"))


def test_merges_are_pairs_of_raw_bytes(tmp_path: Path):
    header = read_header(write_tiny(tmp_path / "a.gguf", fields={"tokenizer.ggml.merges": [*MERGES, "odd"]}))
    assert header.merges[1] == (b" ", b"t")
    assert header.merges[-1] == (b"odd", b"")
