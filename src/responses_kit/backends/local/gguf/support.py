"""What the engine inside ctransformers 0.2.27 can load, checked before it sees the file.

The engine is llama.cpp of September 2023. It answers an unfit file with "Failed to create LLM", an abort or a
segmentation fault; so everything that it takes for granted is checked here and refused by name. Of the two
architectures whose tensors it knows, llama and falcon, only llama is offered: no falcon model was tried.
"""

from __future__ import annotations

import re

from gguf.constants import GGMLQuantizationType, GGUFValueType, Keys

from ..errors import ModelFileError
from .header import Header, Tensor

__all__ = ["ARCHITECTURES", "QUANTISATIONS", "check"]

ARCHITECTURES = ("llama",)
TOKENIZERS = ("llama", "gpt2")
QUANTISATIONS = (
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

_ELSEWHERE = "Serve it with a current engine behind the upstream backend, or choose another model"
_SPECIAL_IDS = (
    Keys.Tokenizer.BOS_ID,
    Keys.Tokenizer.EOS_ID,
    Keys.Tokenizer.UNK_ID,
    Keys.Tokenizer.SEP_ID,
    Keys.Tokenizer.PAD_ID,
)
_OPTIONAL = {
    Keys.General.NAME: GGUFValueType.STRING,
    Keys.General.FILE_TYPE: GGUFValueType.UINT32,
    Keys.Rope.FREQ_BASE: GGUFValueType.FLOAT32,
    "{arch}.rope.scale_linear": GGUFValueType.FLOAT32,
}


def check(header: Header, *, as_it_is: bool) -> None:
    """Refuses a model that the engine cannot load.

    Args:
        header: The model file's header.
        as_it_is: Whether the file goes to the engine unchanged; otherwise what `convert` adds may be missing.

    Raises:
        ModelFileError: Names what is wrong with the file, and what to do about it.
    """
    _architecture(header)
    _tokenizer(header, as_it_is=as_it_is)
    _tensors(header, as_it_is=as_it_is)


def _architecture(header: Header) -> None:
    parts = header.get("split.count", 0)
    if (isinstance(parts, int) and parts > 1) or re.search(r"-\d{5}-of-\d{5}\.gguf$", header.path.name):
        raise ModelFileError(
            f"{header.path} is one part of a model in several files. "
            "Join them with `llama-gguf-split --merge FIRST_PART WHOLE.gguf` (in llama.cpp)."
        )
    if header.architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{header.path} is a model of the architecture {header.architecture!r:.40}; "
            f"the local engine knows {', '.join(ARCHITECTURES)}. {_ELSEWHERE}."
        )
    for template, kind in _OPTIONAL.items():
        key = template.format(arch=header.architecture)
        field = header.fields.get(key)
        if field is not None and field.kind is not kind:
            raise ModelFileError(
                f"{header.path} stores {key} as {field.kind.name}, and the local engine needs {kind.name}. "
                "Convert the model anew."
            )
    scaling = header.text("{arch}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ModelFileError(
            f"{header.path} stretches its context by {scaling!r:.40} scaling, which the local engine does not know. "
            f"{_ELSEWHERE}."
        )


def _tokenizer(header: Header, *, as_it_is: bool) -> None:
    if header.tokenizer not in TOKENIZERS:
        raise ModelFileError(
            f"{header.path} has a tokenizer of the kind {header.tokenizer!r:.40}; "
            f"the local engine knows {', '.join(TOKENIZERS)}. {_ELSEWHERE}."
        )
    bpe = header.tokenizer == "gpt2"
    tokens = len(header.tokens)
    arrays = [(Keys.Tokenizer.TOKEN_TYPE, GGUFValueType.INT32)]
    if as_it_is or not bpe or Keys.Tokenizer.SCORES in header.fields:
        arrays.append((Keys.Tokenizer.SCORES, GGUFValueType.FLOAT32))
    for key, kind in arrays:
        field = header.fields.get(key)
        if field is None or field.item_kind is not kind or len(field.value) != tokens:
            raise ModelFileError(f"{header.path} lacks {key}, or not every token has one. Convert the model anew.")
    if bpe and not isinstance(header.get(Keys.Tokenizer.MERGES), list):
        raise ModelFileError(f"{header.path} lacks {Keys.Tokenizer.MERGES}. Convert the model anew.")
    # The engine looks a newline up while loading, and single bytes when it meets them; it crashes without a token.
    vocabulary = set(header.tokens)
    if bpe and b"\n" not in vocabulary and (as_it_is or "Ċ".encode() not in vocabulary):
        raise ModelFileError(f"{header.path} has no token for a newline in its vocabulary. {_ELSEWHERE}.")
    if not bpe and not vocabulary.issuperset(b"<0x%02X>" % byte for byte in range(256)):
        raise ModelFileError(f"{header.path} has no tokens for single bytes in its vocabulary. {_ELSEWHERE}.")
    required = {Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID} if tokens < 12 else set()  # the engine assumes id 11
    for key in _SPECIAL_IDS:
        field = header.fields.get(key)
        if field is None and key not in required:
            continue
        if field is None or field.kind is not GGUFValueType.UINT32 or field.value >= tokens:
            raise ModelFileError(f"{header.path} is damaged: {key} names no token. Download it again.")


def _tensors(header: Header, *, as_it_is: bool) -> None:
    shapes = _shapes(header)
    for name, tensor in header.tensors.items():
        if name not in shapes:
            raise ModelFileError(
                f"{header.path} has a tensor {name!r:.80}, which the local engine's llama architecture does not know. "
                f"{_ELSEWHERE}."
            )
        if tensor.shape != shapes[name]:
            raise ModelFileError(
                f"{header.path}: the tensor {name} has the shape {tensor.shape}, and by the header it must be "
                f"{shapes[name]}. {_ELSEWHERE}."
            )
        _quantisation(header, tensor)
    optional = set() if as_it_is else {"output.weight"}
    missing = next((name for name in shapes if name not in header.tensors and name not in optional), None)
    if missing is not None:
        raise ModelFileError(f"{header.path} lacks the tensor {missing}. Download it again, or convert the model anew.")


def _quantisation(header: Header, tensor: Tensor) -> None:
    if tensor.kind not in QUANTISATIONS:
        raise ModelFileError(
            f"{header.path}: the tensor {tensor.name} is quantised as {tensor.kind.name}, which the local engine does "
            f"not know; it knows {', '.join(kind.name for kind in QUANTISATIONS)}. Choose a file with one of these, "
            "or make one with `llama-quantize --allow-requantize IN.gguf OUT.gguf Q8_0` (in llama.cpp)."
        )
    if len(tensor.shape) == 1 and tensor.kind is not GGMLQuantizationType.F32:
        raise ModelFileError(
            f"{header.path}: the tensor {tensor.name} is stored as {tensor.kind.name}, and the local engine needs F32 "
            "there. Make the file anew with `llama-quantize` (in llama.cpp)."
        )


def _shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """Every tensor that the engine will ask for, with its shape; they must be all there, and no others."""
    width = _count(header, Keys.LLM.EMBEDDING_LENGTH)
    inner = _count(header, Keys.LLM.FEED_FORWARD_LENGTH)
    layers = _count(header, Keys.LLM.BLOCK_COUNT)
    heads = _count(header, Keys.Attention.HEAD_COUNT)
    kv_heads = _count(header, Keys.Attention.HEAD_COUNT_KV, heads)
    _count(header, Keys.LLM.CONTEXT_LENGTH)
    rotated = _count(header, Keys.Rope.DIMENSION_COUNT, width // heads)
    if width % heads or heads % kv_heads or rotated * heads != width or rotated % 2:
        raise ModelFileError(
            f"{header.path} has {heads} heads, {kv_heads} of them for keys, in a width of {width}, with {rotated} of "
            f"each rotated; the local engine cannot divide it so. {_ELSEWHERE}."
        )
    epsilon = header.fields.get(Keys.Attention.LAYERNORM_RMS_EPS.format(arch=header.architecture))
    if epsilon is None or epsilon.kind is not GGUFValueType.FLOAT32:
        raise ModelFileError(f"{header.path} lacks the epsilon of its norms. Convert the model anew.")
    if layers > len(header.tensors):  # before a damaged count makes a table of four billion layers
        raise ModelFileError(f"{header.path} lacks tensors of its {layers} layers. Download it again.")
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


def _count(header: Header, key: str, default: int | None = None) -> int:
    key = key.format(arch=header.architecture)
    field = header.fields.get(key)
    if field is None and default is not None:
        return default
    if field is None or field.kind is not GGUFValueType.UINT32 or field.value < 1:
        raise ModelFileError(f"{header.path} does not give {key} as one positive number. {_ELSEWHERE}.")
    return int(field.value)
