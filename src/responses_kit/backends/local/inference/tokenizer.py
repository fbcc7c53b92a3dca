"""Text to token ids and back, after the vocabulary in a model file's header.

Control tokens, which open and close turns, have no way in through text: they are left out of the vocabulary that text
is cut into, and `Tokenizer.prompt` takes them as ids. So a user who writes `<|im_end|>` has written ten characters.
On the way out they say nothing, but for those that tell calls and reasoning from text (`dialects.MARKERS`).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

import numpy as np
from tokenizers import Regex
from tokenizers import Tokenizer as Cutter
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from ....schema.base import replace_surrogates
from ...parsing.formats import MARKERS
from ..gguf.conversion import SPELLING
from ..gguf.header import Header

__all__ = ["Decoder", "Tokenizer"]

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6

_TAG = re.compile(r"[^\w\s]\S+[^\w\s]")
"""What a control token looks like in a chat template: <s>, [INST], <|im_end|>."""

_TURN_STARTS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>")
"""A model that opens the next turn has ended its own."""

_WORDS = {
    rule: (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    for rule, digits in {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}.items()
}
"""How text is cut into words before BPE, by the name that the header gives to the rule; GPT-2's rule for the rest."""

_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "exaone")
"""Rules that set every digit apart and then follow GPT-2's."""


class Tokenizer:
    """The tokenizer of one model; thread-safe.

    Args:
        header: The header of a prepared model file.

    Attributes:
        control: Control tokens' ids by their text, as chat templates write them.
        pieces: The bytes that each token stands for, by id; none for control tokens, but for those in `MARKERS`.
        longest: Most bytes that one token stands for.
        bos: Id of the token that begins a text, and whether each prompt starts with it.
        stops: Ids of tokens after which an answer is over.
    """

    def __init__(self, header: Header) -> None:
        self._spaced = header.tokenizer == "llama"
        texts = [token.decode("utf-8", "replace") for token in header.tokens]
        kinds = header.token_types
        tags = {
            text: token
            for token, (text, kind) in enumerate(zip(texts, kinds, strict=True))
            if text in MARKERS or (kind in (CONTROL, USER_DEFINED) and _TAG.fullmatch(text))
        }
        named = {token for token in (header.bos_id, header.eos_id, header.eot_id) if token is not None}
        self.stops = header.stop_ids | {tags[text] for text in _TURN_STARTS if text in tags}
        self.control = tags | {texts[token]: token for token in named | self.stops if texts[token]}
        self.bos = (header.bos_id, header.add_bos)
        barred = set(self.control.values())
        plain = [i for i, kind in enumerate(kinds) if kind in (NORMAL, USER_DEFINED, BYTE) and i not in barred]
        self._cutter = _sentencepiece(header, texts, plain) if self._spaced else _bytelevel(header, plain)
        shown = {tags[text] for text in MARKERS & tags.keys()}
        hidden = {i for i, kind in enumerate(kinds) if kind not in (NORMAL, USER_DEFINED, BYTE) and i not in shown}
        hidden |= self.stops
        self.pieces = [b"" if i in hidden else self._piece(header, i) for i in range(len(texts))]
        self.longest = max(map(len, self.pieces), default=1) or 1

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Whatever it says, none of them is a control token.

        Bytes that the vocabulary has no token for are left out; SmolLM2 lacks a few of ASCII's control characters.
        """
        ids: list[int] = self._cutter.encode(replace_surrogates(text), add_special_tokens=False).ids
        return ids

    def prompt(self, parts: Iterable[str | int]) -> list[int]:
        """Ids of texts and control tokens in a row.

        Args:
            parts: Texts, and ids of control tokens between them.
        """
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += self.encode(part)
        bos, wanted = self.bos
        return [bos, *ids] if wanted and bos is not None and ids[:1] != [bos] else ids

    def decoder(self) -> Decoder:
        """A decoder for one answer."""
        return Decoder(self.pieces, self._spaced)

    def _piece(self, header: Header, token: int) -> bytes:
        piece = header.tokens[token]
        if not self._spaced:
            return piece
        if header.token_types[token] == BYTE:
            return bytes([int(piece[3:5], 16)]) if re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", piece) else b""
        return piece.replace("▁".encode(), b" ")


class Decoder:
    """Turns the tokens of one answer into text, and never tears a character: incomplete bytes wait for the rest.

    Args:
        pieces: The bytes of each token by id.
        spaced: Whether the first space of the answer belongs to the tokenizer and not to the text.
    """

    def __init__(self, pieces: list[bytes], spaced: bool = False) -> None:
        self._pieces = pieces
        self._spaced = spaced
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that this token completes; often all of its own, sometimes nothing."""
        piece = self._pieces[token]
        if self._spaced and piece:
            self._spaced = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character was not finished."""
        return self._utf8.decode(b"", True)


def _bytelevel(header: Header, plain: list[int]) -> Cutter:
    vocabulary = {_visible(header.tokens[i]): i for i in plain}
    merges = [
        (left, right)
        for left, right in ((_visible(one), _visible(other)) for one, other in header.merges)
        if left in vocabulary and right in vocabulary and left + right in vocabulary
    ]
    rule = header.pre_tokenizer or ""
    words: list[PreTokenizer]
    if rule in _WORDS:
        words = [Split(Regex(_WORDS[rule]), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        words = [ByteLevel(add_prefix_space=False)]
        if rule in _SINGLE_DIGITS:
            words.insert(0, Digits(individual_digits=True))
    cutter = Cutter(BPE(vocabulary, merges, ignore_merges=rule == "llama-bpe"))
    cutter.pre_tokenizer = PreTokenizers(words)
    return cutter


def _sentencepiece(header: Header, texts: list[str], plain: list[int]) -> Cutter:
    """SentencePiece joins the pair whose result scores best: in the language of BPE, merges in order of score."""
    vocabulary = {texts[i]: i for i in plain}
    scores = header.get("tokenizer.ggml.scores", np.zeros(len(texts), np.float32)).tolist()
    normal = [i for i in plain if header.token_types[i] == NORMAL]
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token in normal:
        text = texts[token]
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                merges.append((-scores[token], left, right, (text[:cut], text[cut:])))
    merges.sort()
    unknown = texts[header.token_types.index(2)] if 2 in header.token_types else None
    if unknown is not None:
        vocabulary.setdefault(unknown, header.token_types.index(2))
    cutter = Cutter(
        BPE(vocabulary, [pair for *_, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [Prepend("▁")] if header.get("tokenizer.ggml.add_space_prefix", True) else []
    cutter.normalizer = Normalizers([*prefix, Replace(" ", "▁")])
    return cutter


_VISIBLE = {ord(byte): chr(code) for code, byte in SPELLING.items()}
"""Bytes in the printable spelling that `tokenizers` expects of byte-level tokens."""


def _visible(token: bytes) -> str:
    return token.decode("latin-1").translate(_VISIBLE)
