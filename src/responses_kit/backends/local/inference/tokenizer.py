"""Tokenization of text, with the vocabulary in a model file's header.

Control tokens, which begin and end messages, are not part of the vocabulary that encodes text; `encode_prompt` takes
them as ids, so `<|im_end|>` in a user's text is ten characters. Decoded control tokens are empty, except for those
that delimit calls and reasoning (`formats.MARKER_TOKENS`).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

import numpy as np
from tokenizers import Regex
from tokenizers import Tokenizer as TextEncoder
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from ....schema.base import replace_surrogates
from ...parsing.formats import MARKER_TOKENS
from ..gguf.conversion import GPT2_BYTE_DECODER
from ..gguf.header import Header

__all__ = ["Decoder", "Tokenizer"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Values of `gguf.TokenType`."""

_CONTROL_TOKEN = re.compile(r"[^\w\s]\S+[^\w\s]")
"""The form of a control token, such as <s>, [INST] or <|im_end|>."""

_MESSAGE_OPENERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>")
"""Control tokens that begin a message; a model that generates one has finished its answer."""

_WORD_PATTERNS = {
    rule: (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    for rule, digits in {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}.items()
}
"""Patterns that split text into words before BPE, by the header's name of the rule. Other names use GPT-2's pattern."""

_SINGLE_DIGIT_RULES = ("smollm", "starcoder", "refact", "command-r", "exaone")
"""Rules that split off every digit and then use GPT-2's pattern."""


class Tokenizer:
    """The tokenizer of one model; thread-safe.

    Args:
        header: The header of a prepared model file.

    Attributes:
        control_tokens: The ids of control tokens by their text, as chat templates write them.
        token_bytes: The bytes of each token, by id; empty for control tokens that are not in `MARKER_TOKENS`.
        max_token_length: The length of the longest token in bytes.
        stop_ids: The ids of tokens that end an answer.
    """

    def __init__(self, header: Header) -> None:
        self._is_sentencepiece = header.tokenizer == "llama"
        texts = [token.decode("utf-8", "replace") for token in header.tokens]
        types = header.token_types
        control = {
            text: token
            for token, (text, token_type) in enumerate(zip(texts, types, strict=True))
            if text in MARKER_TOKENS or (token_type in (CONTROL, USER_DEFINED) and _CONTROL_TOKEN.fullmatch(text))
        }
        special = {token for token in (header.bos_id, header.eos_id, header.eot_id) if token is not None}
        self.stop_ids = header.stop_ids | {control[text] for text in _MESSAGE_OPENERS if text in control}
        self.control_tokens = control | {texts[token]: token for token in special | self.stop_ids if texts[token]}
        self._bos_id = header.bos_id
        self._add_bos = header.add_bos
        excluded = set(self.control_tokens.values())
        is_text = [token_type in (NORMAL, USER_DEFINED, BYTE) for token_type in types]
        text_ids = [i for i in range(len(types)) if is_text[i] and i not in excluded]
        self._encoder = (
            _sentencepiece_encoder(header, texts, text_ids)
            if self._is_sentencepiece
            else _byte_level_encoder(header, text_ids)
        )
        markers = {control[text] for text in MARKER_TOKENS & control.keys()}
        hidden = {i for i in range(len(types)) if not is_text[i] and i not in markers} | self.stop_ids
        self.token_bytes = [b"" if i in hidden else self._decode_token(header, i) for i in range(len(texts))]
        self.max_token_length = max(map(len, self.token_bytes), default=1) or 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; none of them is a control token.

        Bytes without a token in the vocabulary are skipped; SmolLM2 lacks a few of ASCII's control characters.
        """
        ids: list[int] = self._encoder.encode(replace_surrogates(text), add_special_tokens=False).ids
        return ids

    def encode_prompt(self, parts: Iterable[str | int]) -> list[int]:
        """Return the ids of a prompt.

        Args:
            parts: Texts, and the ids of control tokens between them.
        """
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += self.encode(part)
        bos = self._bos_id
        return [bos, *ids] if self._add_bos and bos is not None and ids[:1] != [bos] else ids

    def decoder(self) -> Decoder:
        """Return a decoder for one answer."""
        return Decoder(self.token_bytes, self._is_sentencepiece)

    def _decode_token(self, header: Header, token: int) -> bytes:
        piece = header.tokens[token]
        if not self._is_sentencepiece:
            return piece
        if header.token_types[token] == BYTE:
            return bytes([int(piece[3:5], 16)]) if re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", piece) else b""
        return piece.replace("▁".encode(), b" ")


class Decoder:
    """An incremental decoder for the tokens of one answer, which buffers incomplete characters.

    Args:
        token_bytes: The bytes of each token, by id.
        strip_first_space: Whether the tokenizer adds a space to the beginning of a text.
    """

    def __init__(self, token_bytes: list[bytes], strip_first_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._strip_first_space = strip_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that this token completes, which may be empty."""
        data = self._token_bytes[token]
        if self._strip_first_space and data:
            self._strip_first_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return the rest of the text: U+FFFD for an incomplete character, or an empty string."""
        return self._utf8.decode(b"", True)


_GPT2_BYTE_ENCODER = {ord(byte): chr(code) for code, byte in GPT2_BYTE_DECODER.items()}
"""GPT-2's printable encoding of bytes, which `tokenizers` expects of byte-level tokens."""


def _encode_bytes(token: bytes) -> str:
    return token.decode("latin-1").translate(_GPT2_BYTE_ENCODER)


def _byte_level_encoder(header: Header, text_ids: list[int]) -> TextEncoder:
    vocabulary = {_encode_bytes(header.tokens[i]): i for i in text_ids}
    merges = [
        (left, right)
        for left, right in ((_encode_bytes(left), _encode_bytes(right)) for left, right in header.merges)
        if left in vocabulary and right in vocabulary and left + right in vocabulary
    ]
    rule = header.pre_tokenizer or ""
    splitters: list[PreTokenizer]
    if rule in _WORD_PATTERNS:
        splitters = [
            Split(Regex(_WORD_PATTERNS[rule]), "isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        splitters = [ByteLevel(add_prefix_space=False)]
        if rule in _SINGLE_DIGIT_RULES:
            splitters.insert(0, Digits(individual_digits=True))
    encoder = TextEncoder(BPE(vocabulary, merges, ignore_merges=rule == "llama-bpe"))
    encoder.pre_tokenizer = PreTokenizers(splitters)
    return encoder


def _sentencepiece_encoder(header: Header, texts: list[str], text_ids: list[int]) -> TextEncoder:
    """Return an encoder that joins the pair with the best score of the result: BPE with merges ordered by score."""
    vocabulary = {texts[i]: i for i in text_ids}
    scores = header.get("tokenizer.ggml.scores", np.zeros(len(texts), np.float32)).tolist()
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token in text_ids:
        if header.token_types[token] != NORMAL:
            continue
        text = texts[token]
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                merges.append((-scores[token], left, right, (text[:cut], text[cut:])))
    merges.sort()
    unknown = None
    if UNKNOWN in header.token_types:
        unknown_id = header.token_types.index(UNKNOWN)
        unknown = texts[unknown_id]
        vocabulary.setdefault(unknown, unknown_id)
    encoder = TextEncoder(
        BPE(vocabulary, [pair for *_, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [Prepend("▁")] if header.get("tokenizer.ggml.add_space_prefix", True) else []
    encoder.normalizer = Normalizers([*prefix, Replace(" ", "▁")])
    return encoder
