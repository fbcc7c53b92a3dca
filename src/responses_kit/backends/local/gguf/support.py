"""Checks that the engine inside ctransformers 0.2.27 can load a model file.

The engine is llama.cpp of September 2023. It reacts to an unsuitable file with "Failed to create LLM", an abort or a
segmentation fault. Everything that it assumes is therefore checked here, and an error names the problem. The engine
knows two architectures, llama and falcon; only llama is supported, because falcon models are untested.
"""

from __future__ import annotations

import re

from gguf.constants import GGMLQuantizationType, GGUFValueType, Keys

from ..errors import ModelFileError
from .header import Header, Tensor

__all__ = ["SUPPORTED_ARCHITECTURES", "SUPPORTED_QUANTIZATIONS", "check_supported"]

SUPPORTED_ARCHITECTURES = ("llama",)
"""Architectures that the local engine loads."""

SUPPORTED_TOKENIZERS = ("llama", "gpt2")
"""Kinds of tokenizers that the local engine loads."""

SUPPORTED_QUANTIZATIONS = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)
"""Quantizations that the local engine evaluates."""

_REMEDY = "Choose another model, or serve this one with a current engine and connect it as an upstream backend"
_SPECIAL_IDS = (
    Keys.Tokenizer.BOS_ID,
    Keys.Tokenizer.EOS_ID,
    Keys.Tokenizer.UNK_ID,
    Keys.Tokenizer.SEP_ID,
    Keys.Tokenizer.PAD_ID,
)
_OPTIONAL_FIELDS = {
    Keys.General.NAME: GGUFValueType.STRING,
    Keys.General.FILE_TYPE: GGUFValueType.UINT32,
    Keys.Rope.FREQ_BASE: GGUFValueType.FLOAT32,
    "{arch}.rope.scale_linear": GGUFValueType.FLOAT32,
}


def check_supported(header: Header, *, is_final: bool) -> None:
    """Raise an error if the engine cannot load a model.

    Args:
        header: The header of the model's file.
        is_final: Whether the engine loads this very file. Otherwise `convert` adds the parts that it supplies.

    Raises:
        ModelFileError: The engine cannot load the file; the message gives the reason and a remedy.
    """
    _check_architecture(header)
    _check_tokenizer(header, is_final=is_final)
    _check_tensors(header, is_final=is_final)


def _check_architecture(header: Header) -> None:
    parts = header.get("split.count", 0)
    if (isinstance(parts, int) and parts > 1) or re.search(r"-\d{5}-of-\d{5}\.gguf$", header.path.name):
        raise ModelFileError(
            f"{header.path} is one part of a model that is split into several files. "
            "Merge them with `llama-gguf-split --merge FIRST_PART MERGED.gguf` from llama.cpp."
        )
    if header.architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelFileError(
            f"{header.path} has the architecture {header.architecture!r:.40}, but the local engine supports only "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}. {_REMEDY}."
        )
    for template, value_type in _OPTIONAL_FIELDS.items():
        key = template.format(arch=header.architecture)
        field = header.fields.get(key)
        if field is not None and field.value_type is not value_type:
            raise ModelFileError(
                f"{header.path} stores {key} as {field.value_type.name}, but the local engine needs {value_type.name}. "
                "Convert the model again with a current llama.cpp."
            )
    scaling = header.get_text("{arch}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ModelFileError(
            f"{header.path} extends its context with {scaling!r:.40} scaling, which the local engine does not support. "
            f"{_REMEDY}."
        )


def _check_tokenizer(header: Header, *, is_final: bool) -> None:
    if header.tokenizer not in SUPPORTED_TOKENIZERS:
        raise ModelFileError(
            f"{header.path} has a tokenizer of the kind {header.tokenizer!r:.40}, but the local engine supports only "
            f"{', '.join(SUPPORTED_TOKENIZERS)}. {_REMEDY}."
        )
    is_bpe = header.tokenizer == "gpt2"
    token_count = len(header.tokens)
    arrays = [(Keys.Tokenizer.TOKEN_TYPE, GGUFValueType.INT32)]
    if is_final or not is_bpe or Keys.Tokenizer.SCORES in header.fields:
        arrays.append((Keys.Tokenizer.SCORES, GGUFValueType.FLOAT32))
    for key, item_type in arrays:
        field = header.fields.get(key)
        if field is None or field.item_type is not item_type or len(field.value) != token_count:
            raise ModelFileError(
                f"{header.path} needs one {item_type.name} in {key} for each token of its vocabulary. Convert the "
                "model again with a current llama.cpp."
            )
    if is_bpe and not isinstance(header.get(Keys.Tokenizer.MERGES), list):
        raise ModelFileError(
            f"{header.path} lacks {Keys.Tokenizer.MERGES}. Convert the model again with a current llama.cpp."
        )
    # The engine looks up the token of a newline when it loads a model, and those of single bytes when they occur in
    # text. It crashes if one is missing.
    vocabulary = set(header.tokens)
    if is_bpe and b"\n" not in vocabulary and (is_final or "Ċ".encode() not in vocabulary):
        raise ModelFileError(f"{header.path} has no token for a newline in its vocabulary. {_REMEDY}.")
    if not is_bpe and not vocabulary.issuperset(b"<0x%02X>" % byte for byte in range(256)):
        raise ModelFileError(f"{header.path} lacks tokens for single bytes in its vocabulary. {_REMEDY}.")
    # Without these entries, the engine uses ids up to 11.
    required = {Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID} if token_count < 12 else set()
    for key in _SPECIAL_IDS:
        field = header.fields.get(key)
        if field is None and key not in required:
            continue
        if field is None or field.value_type is not GGUFValueType.UINT32 or field.value >= token_count:
            raise ModelFileError(
                f"{header.path} is damaged: {key} is not the id of a token in its vocabulary. Download it again."
            )


def _check_tensors(header: Header, *, is_final: bool) -> None:
    shapes = _expected_shapes(header)
    for name, tensor in header.tensors.items():
        if name not in shapes:
            raise ModelFileError(
                f"{header.path} contains the tensor {name!r:.80}, which is not part of the llama architecture of the "
                f"local engine. {_REMEDY}."
            )
        if tensor.shape != shapes[name]:
            raise ModelFileError(
                f"{header.path} cannot be loaded: the tensor {name} has the shape {tensor.shape}, but the metadata "
                f"requires {shapes[name]}. {_REMEDY}."
            )
        _check_quantization(header, tensor)
    optional = set() if is_final else {"output.weight"}
    missing = next((name for name in shapes if name not in header.tensors and name not in optional), None)
    if missing is not None:
        raise ModelFileError(
            f"{header.path} lacks the tensor {missing}. Download it again, or convert the model again with a current "
            "llama.cpp."
        )


def _check_quantization(header: Header, tensor: Tensor) -> None:
    if tensor.quantization not in SUPPORTED_QUANTIZATIONS:
        raise ModelFileError(
            f"{header.path} cannot be loaded: the tensor {tensor.name} is quantized as {tensor.quantization.name}, but "
            f"the local engine supports only {', '.join(kind.name for kind in SUPPORTED_QUANTIZATIONS)}. Choose a file "
            "with one of these, or make one with `llama-quantize --allow-requantize IN.gguf OUT.gguf Q8_0` from "
            "llama.cpp."
        )
    if len(tensor.shape) == 1 and tensor.quantization is not GGMLQuantizationType.F32:
        raise ModelFileError(
            f"{header.path} cannot be loaded: the tensor {tensor.name} is stored as {tensor.quantization.name}, but "
            "the local engine needs F32 for it. Quantize the model again with `llama-quantize` from llama.cpp."
        )


def _expected_shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the engine loads, by name; a file may contain no other tensors."""
    width = _get_positive(header, Keys.LLM.EMBEDDING_LENGTH)
    inner = _get_positive(header, Keys.LLM.FEED_FORWARD_LENGTH)
    layers = _get_positive(header, Keys.LLM.BLOCK_COUNT)
    heads = _get_positive(header, Keys.Attention.HEAD_COUNT)
    kv_heads = _get_positive(header, Keys.Attention.HEAD_COUNT_KV, heads)
    _get_positive(header, Keys.LLM.CONTEXT_LENGTH)
    rotated = _get_positive(header, Keys.Rope.DIMENSION_COUNT, width // heads)
    if width % heads or heads % kv_heads or rotated * heads != width or rotated % 2:
        raise ModelFileError(
            f"{header.path} has attention dimensions that the local engine does not support: {heads} heads, {kv_heads} "
            f"key-value heads, an embedding length of {width} and {rotated} rotary dimensions. {_REMEDY}."
        )
    epsilon_key = Keys.Attention.LAYERNORM_RMS_EPS.format(arch=header.architecture)
    epsilon = header.fields.get(epsilon_key)
    if epsilon is None or epsilon.value_type is not GGUFValueType.FLOAT32:
        raise ModelFileError(
            f"{header.path} does not contain {epsilon_key} as FLOAT32. Convert the model again with a current "
            "llama.cpp."
        )
    if layers > len(header.tensors):  # a damaged count would otherwise create a table of four billion layers
        raise ModelFileError(f"{header.path} lacks tensors for its {layers} layers. Download it again.")
    narrow = width // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (width, len(header.tokens)),
        "output_norm.weight": (width,),
        "output.weight": (width, len(header.tokens)),
    }
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (width,),
            f"blk.{layer}.attn_q.weight": (width, width),
            f"blk.{layer}.attn_k.weight": (width, narrow),
            f"blk.{layer}.attn_v.weight": (width, narrow),
            f"blk.{layer}.attn_output.weight": (width, width),
            f"blk.{layer}.ffn_norm.weight": (width,),
            f"blk.{layer}.ffn_gate.weight": (width, inner),
            f"blk.{layer}.ffn_down.weight": (inner, width),
            f"blk.{layer}.ffn_up.weight": (width, inner),
        }
    return shapes


def _get_positive(header: Header, key: str, default: int | None = None) -> int:
    key = key.format(arch=header.architecture)
    field = header.fields.get(key)
    if field is None and default is not None:
        return default
    if field is None or field.value_type is not GGUFValueType.UINT32 or field.value < 1:
        raise ModelFileError(f"{header.path} does not contain {key} as one positive integer. {_REMEDY}.")
    return int(field.value)
