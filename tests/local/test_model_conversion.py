"""Conversion of model files for the engine, and the cache."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from responses_kit.backends.local import cache
from responses_kit.backends.local.download.catalog import GENERIC_SAMPLING
from responses_kit.backends.local.errors import ModelFileError
from responses_kit.backends.local.gguf.header import Header, read_header
from responses_kit.backends.local.gguf.support import SUPPORTED_QUANTIZATIONS, check_supported
from responses_kit.backends.local.model_files import PreparedModel, prepare

from .tiny import MERGES, TOKENS, write_tiny

GENERATE = """
import sys
from ctransformers import LLM
from ctransformers.llm import Config
from responses_kit.backends.local.gguf.header import read_header
model = LLM(sys.argv[1], "llama", config=Config(context_length=512, threads=1))
def message(role, text):
    return [1, *model.tokenize(role + chr(10) + text, add_bos_token=False)]
end = [2, *model.tokenize(chr(10), add_bos_token=False)]
prompt = message("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face") + end
prompt += message("user", "Write one sentence about cats.") + end + message("assistant", "")
tokens = read_header(sys.argv[1]).tokens
answer = b""
for token in model.generate(prompt, top_k=1, temperature=1.0, repetition_penalty=1.0):
    if token == 2 or len(answer) > 40:
        break
    answer += tokens[token]
print(answer.decode())
"""

LOAD = """
import sys
from ctransformers import LLM
from ctransformers.llm import Config
for path in sys.argv[1:]:
    model = LLM(path, "llama", config=Config(context_length=64, threads=1), lib="basic")
    model.eval([1, 2, 3, 4])
    assert len(model.logits) == model.vocab_size, path
    assert all(logit == logit for logit in model.logits), path
    print("loaded")
"""


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESPONSES_KIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights(header: Header, name: str) -> bytes:
    tensor = header.tensors[name]
    with header.path.open("rb") as file:
        file.seek(header.data_start + tensor.offset)
        return file.read(tensor.size)


def test_conversion_turns_tokens_into_raw_bytes(tmp_path: Path):
    header = prepare(write_tiny(tmp_path / "tiny.gguf")).header
    raw = [" ", "\n", "h", "i", "t", " t", "hi", " hi", b"\xc3", b"\xa9", "é", "e", " \n", b"\xe9"]
    assert header.tokens[:14] == [t.encode() if isinstance(t, str) else t for t in raw]
    assert header.tokens[14:] == [text.encode() for text in TOKENS[14:]]


def test_conversion_keeps_space_and_newline_in_merges(tmp_path: Path):
    header = prepare(write_tiny(tmp_path / "tiny.gguf")).header
    stored = header.get("tokenizer.ggml.merges")
    assert stored == [b"h i", "Ġ t".encode(), "Ġ hi".encode(), b"\xc3 \xa9", "Ġ Ċ".encode()]
    assert header.merges == [(b"h", b"i"), (b" ", b"t"), (b" ", b"hi"), (b"\xc3", b"\xa9"), (b" ", b"\n")]
    assert len(MERGES) == len(stored)


def test_conversion_gives_descending_scores(tmp_path: Path):
    scores = prepare(write_tiny(tmp_path / "tiny.gguf")).header.get("tokenizer.ggml.scores")
    assert scores.tolist() == [-float(i) for i in range(len(TOKENS))]


def test_conversion_keeps_weights_and_metadata(tmp_path: Path):
    source = read_header(write_tiny(tmp_path / "tiny.gguf"))
    converted = prepare(source.path).header
    assert converted.version == 2
    assert [name for name in converted.tensors if name != "output.weight"] == list(source.tensors)
    for name in source.tensors:
        assert weights(converted, name) == weights(source, name), name
    changed = {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"}
    for key, field in source.fields.items():
        other = converted.fields[key]
        assert (field.value_type, field.item_type) == (other.value_type, other.item_type)
        assert key in changed or np.array_equal(field.value, other.value), key


def test_conversion_shares_tied_embeddings(tmp_path: Path):
    converted = prepare(write_tiny(tmp_path / "tiny.gguf")).header
    assert weights(converted, "output.weight") == weights(converted, "token_embd.weight")
    assert converted.tensors["output.weight"].offset == converted.tensors["token_embd.weight"].offset


def test_conversion_keeps_output_matrix(tmp_path: Path):
    source = read_header(write_tiny(tmp_path / "tiny.gguf", tied=False))
    converted = prepare(source.path).header
    assert weights(converted, "output.weight") == weights(source, "output.weight")
    assert weights(converted, "output.weight") != weights(converted, "token_embd.weight")


def test_gguf_package_reads_converted_file(tmp_path: Path):
    reader = gguf.GGUFReader(prepare(write_tiny(tmp_path / "tiny.gguf")).path)
    assert reader.fields["GGUF.version"].contents() == 2
    assert {tensor.name for tensor in reader.tensors} >= {"output.weight", "token_embd.weight"}


def test_loadable_file_is_used_unconverted(tmp_path: Path, cache_directory: Path):
    first = prepare(write_tiny(tmp_path / "tiny.gguf"))
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(first.path.read_bytes())
    assert prepare(copy).path == copy
    assert len(list(cache_directory.glob("converted/*"))) == 1


def test_model_is_converted_once_per_version(tmp_path: Path):
    path = write_tiny(tmp_path / "tiny.gguf")
    stages: list[str] = []
    first = prepare(path, progress=lambda stage, done, total: stages.append(stage))
    assert set(stages) == {"converting the model"}
    stages.clear()
    assert prepare(path, progress=lambda stage, done, total: stages.append(stage)).path == first.path
    assert stages == []
    os.utime(path, ns=(1, 1))
    assert prepare(path).path != first.path


def test_damaged_converted_file_is_replaced(tmp_path: Path):
    path = write_tiny(tmp_path / "tiny.gguf")
    converted = prepare(path).path
    whole = converted.read_bytes()
    converted.write_bytes(whole[: len(whole) // 2])
    assert prepare(path).path.read_bytes() == whole


def test_progress_is_monotonic_and_ends_at_total(tmp_path: Path):
    reports: list[tuple[str, int, int | None]] = []
    path = write_tiny(tmp_path / "tiny.gguf", width=512)
    prepare(path, progress=lambda *report: reports.append(report))
    done = [done for _, done, _ in reports]
    assert len(done) > 2
    assert done == sorted(done)
    assert reports[-1][1] == reports[-1][2] == prepare(path).path.stat().st_size


def test_name_and_sampling_come_from_file(tmp_path: Path):
    model = prepare(write_tiny(tmp_path / "My-Model.Q8_0.gguf"))
    assert (model.name, model.defaults) == ("my-model.q8_0", GENERIC_SAMPLING)
    fields = {"general.sampling.temp": np.float32(0.5), "general.sampling.top_p": np.float32(7)}
    model = prepare(write_tiny(tmp_path / "other.gguf", fields=fields))
    assert (model.defaults.temperature, model.defaults.top_p) == (0.5, GENERIC_SAMPLING.top_p)


def test_unsupported_model_is_refused_before_writing(tmp_path: Path, cache_directory: Path):
    with pytest.raises(ModelFileError, match="'gemma3'"):
        prepare(write_tiny(tmp_path / "tiny.gguf", arch="gemma3"))
    assert not cache_directory.exists()


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_filling_disk_leaves_no_file(
    tmp_path: Path, cache_directory: Path, monkeypatch: pytest.MonkeyPatch, broken: str
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*{"fsync": (cache.os, "fsync", full), "replace": (Path, "replace", full)}[broken])
    with pytest.raises(cache.DiskFullError, match=r"is full.*RESPONSES_KIT_CACHE"):
        prepare(write_tiny(tmp_path / "tiny.gguf"))
    assert [path for path in cache_directory.rglob("*") if path.is_file() and path.name != "lock"] == []


def test_full_disk_leaves_no_file(tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESPONSES_KIT_CACHE", str(small_disk))
    path = write_tiny(tmp_path / "tiny.gguf", width=512)
    with pytest.raises(cache.DiskFullError, match=r"MiB left, but \d+ MiB are needed"):
        prepare(path)
    monkeypatch.setattr(cache, "check_free_space", lambda size: None)
    with pytest.raises(cache.DiskFullError, match="is full"):
        prepare(path)
    assert [path for path in small_disk.rglob("*") if path.is_file() and path.name != "lock"] == []


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RESPONSES_KIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelFileError, match=r"cannot be written: .*RESPONSES_KIT_CACHE"):
        prepare(write_tiny(tmp_path / "tiny.gguf"))


def test_read_only_filled_cache_works(tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESPONSES_KIT_CACHE", str(small_disk))
    path = write_tiny(tmp_path / "tiny.gguf")
    converted = prepare(path).path
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert prepare(path).path == converted
    with pytest.raises(ModelFileError, match="cannot be written: Read-only"):
        prepare(write_tiny(tmp_path / "other.gguf"))


def test_cache_lists_models(tmp_path: Path):
    assert cache.list_files() == []
    converted = prepare(write_tiny(tmp_path / "tiny.gguf")).path
    assert cache.list_files() == [cache.CachedFile(converted, converted.stat().st_size, is_converted=True)]


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/responses-kit"),
        ("linux", {"HOME": "/h"}, "/h/.cache/responses-kit"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Caches/responses-kit"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/responses-kit"),
        ("linux", {"RESPONSES_KIT_CACHE": "~/c", "HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/c"),
    ],
)
def test_cache_is_in_system_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
):
    for name in ("RESPONSES_KIT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cache.sys, "platform", platform)
    assert cache.directory() == Path(expected)


def test_accepted_files_are_evaluated_by_engine(tmp_path: Path):
    pytest.importorskip("ctransformers")
    paths = [
        prepare(write_tiny(tmp_path / "bpe.gguf")).path,
        prepare(write_tiny(tmp_path / "untied.gguf", tied=False)).path,
        prepare(write_tiny(tmp_path / "spm.gguf", kind="llama")).path,
    ]
    for kind in SUPPORTED_QUANTIZATIONS:
        raw = {f"blk.{i}.{n}.weight": kind for i in (0, 1) for n in ("attn_q", "attn_k", "ffn_up", "ffn_down")}
        source = write_tiny(tmp_path / f"{kind.name}.gguf", width=256, raw={"token_embd.weight": kind} | raw)
        paths.append(prepare(source).path)
    for path in paths:
        check_supported(read_header(path), is_final=True)
    process = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, paths)], capture_output=True, text=True, timeout=50, check=False
    )
    assert process.returncode == 0, f"after {process.stdout.count('loaded')} of {len(paths)}: {process.stderr[-500:]}"
    assert process.stdout.count("loaded") == len(paths)


@pytest.mark.local
def test_default_model_is_prepared(smollm2: PreparedModel):
    header = smollm2.header
    assert (smollm2.name, smollm2.path) == ("smollm2", header.path)
    assert (smollm2.defaults.temperature, smollm2.defaults.top_p) == (0.2, 0.9)
    assert (header.version, header.context_length, len(header.tokens)) == (2, 8192, 49152)
    assert header.tokens[header.bos_id or 0] == b"<|im_start|>"
    assert header.tokens[header.eos_id or 0] == b"<|im_end|>"
    assert {header.tokens[i] for i in header.stop_ids} == {b"<|im_end|>", b"<|endoftext|>"}
    assert b" hello" in header.tokens
    assert header.chat_template is not None


@pytest.mark.local
def test_default_model_matches_current_engines(smollm2: PreparedModel):
    process = subprocess.run(
        [sys.executable, "-c", GENERATE, str(smollm2.path)], capture_output=True, text=True, timeout=50, check=False
    )
    assert process.returncode == 0, process.stderr[-500:]
    # The answer of llama.cpp of 2026 to the same prompt, from the original file.
    assert process.stdout.startswith("A cat is a majestic creature with a fluffy")
