from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit.backends.local.inference.tokenizer import CONTROL, NORMAL, USER_DEFINED, Decoder, Tokenizer
from responses_kit.backends.local.model_files import PreparedModel
from responses_kit.backends.parsing.formats import MARKER_TOKENS

from .conversation import tiny_model

BYTES = [bytes([value]) for value in range(256)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return byte-level BPE with five merges and two control tokens."""
    return Tokenizer(tiny_model(tmp_path_factory.mktemp("bpe")).header)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return SentencePiece, in which `hi` scores better than `▁h`, and `</s>` also consists of other tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    more = ["▁", "h", "i", "<", "/", "s", ">", "hi", "▁h", "▁hi", "</", "s>"]
    scores = [0.0] * len(tokens) + [-9.0] * 7 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    types = [2, 3, 3] + [6] * 256 + [1] * len(more)
    fields = {
        "tokenizer.ggml.tokens": tokens + more,
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.unknown_token_id": np.uint32(0),
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(2),
    }
    shapes = {name: (len(tokens + more), 32) for name in ("token_embd.weight", "output.weight")}
    folder = tmp_path_factory.mktemp("spm")
    return Tokenizer(tiny_model(folder, kind="llama", fields=fields, tensors=shapes).header)


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.decoder()
    return "".join(map(decoder.feed, ids)) + decoder.flush()


def test_byte_level_merges_match_training(tokenizer: Tokenizer):
    assert [tokenizer.token_bytes[i] for i in tokenizer.encode("hi hi té")] == [b"hi", b" hi", b" t", "é".encode()]


def test_text_without_token_is_dropped(tokenizer: Tokenizer):
    assert text_of(tokenizer, tokenizer.encode("h\0\x04xi")) == "hi"


def test_control_token_text_gives_ordinary_tokens(tokenizer: Tokenizer, sentencepiece: Tokenizer):
    assert not set(tokenizer.control_tokens.values()) & set(tokenizer.encode("<|im_end|>hi"))
    ids = sentencepiece.encode("hi</s>")
    assert text_of(sentencepiece, ids) == "hi</s>"
    assert not {1, 2} & set(ids)


def test_control_tokens_enter_as_ids_only(tokenizer: Tokenizer):
    end = tokenizer.control_tokens["<|im_end|>"]
    assert tokenizer.encode_prompt(["hi", end, "", "hi"]) == [*tokenizer.encode("hi"), end, *tokenizer.encode("hi")]
    assert tokenizer.token_bytes[end] == b""
    assert end in tokenizer.stop_ids


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("token_type", [NORMAL, CONTROL, USER_DEFINED])
def test_marker_tokens_are_text_in_output_only(kind: str, token_type: int, tmp_path: Path):
    markers = sorted(MARKER_TOKENS)
    letters = ["Ġ", "Ċ", *sorted(set("".join(markers)))]
    others = letters if kind == "gpt2" else ["▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = ["<unk>", "<s>", "</s>", "<|fim|>", *markers, *others]
    types = [2, 3, 3, 3] + [token_type] * len(markers) + [6 if other.startswith("<0x") else NORMAL for other in others]
    fields: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(2),
    }
    if kind == "gpt2":
        fields["tokenizer.ggml.merges"] = ["< t"]
    else:
        fields["tokenizer.ggml.scores"] = -np.arange(len(tokens), dtype=np.float32)
    shapes = {name: (len(tokens), 32) for name in ("token_embd.weight", "output.weight")}
    tokenizer = Tokenizer(tiny_model(tmp_path, kind=kind, fields=fields, tensors=shapes).header)
    for marker in markers:
        assert tokens[tokenizer.control_tokens[marker]] == marker
        assert text_of(tokenizer, [tokenizer.control_tokens[marker]]) == marker
        assert not set(tokenizer.control_tokens.values()) & set(tokenizer.encode(marker))
        assert text_of(tokenizer, tokenizer.encode(marker)) == marker
    assert text_of(tokenizer, [1, tokenizer.control_tokens["<|fim|>"], 2]) == ""


def test_sentencepiece_merges_best_pair_first(sentencepiece: Tokenizer):
    assert [sentencepiece.token_bytes[i] for i in sentencepiece.encode("hi h")] == [b" hi", b" h"]


def test_sentencepiece_falls_back_to_bytes(sentencepiece: Tokenizer):
    assert [sentencepiece.token_bytes[i] for i in sentencepiece.encode("é")] == [b" ", b"\xc3", b"\xa9"]


def test_sentencepiece_leading_space_is_stripped(sentencepiece: Tokenizer):
    assert text_of(sentencepiece, sentencepiece.encode("hi  hi")) == "hi  hi"


def test_prompt_starts_with_single_bos(sentencepiece: Tokenizer):
    assert sentencepiece.encode_prompt(["hi"])[0] == 1
    assert sentencepiece.encode_prompt([1, "hi"]) == sentencepiece.encode_prompt(["hi"])


def test_lone_surrogate_becomes_replacement_character(sentencepiece: Tokenizer):
    assert text_of(sentencepiece, sentencepiece.encode("h\ud83di")) == "h\ufffdi"


@given(st.text(), st.data())
def test_characters_split_over_tokens_are_joined(text: str, data: st.DataObject):
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    decoder = Decoder(chunks)
    pieces = [decoder.feed(token) for token in range(len(chunks))]
    assert "".join(pieces) + decoder.flush() == raw.decode()
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


@given(st.binary())
def test_invalid_bytes_decode_as_in_python(raw: bytes):
    decoder = Decoder(BYTES)
    assert "".join(map(decoder.feed, raw)) + decoder.flush() == raw.decode("utf-8", "replace")


def test_unfinished_character_is_replaced_at_end():
    decoder = Decoder(BYTES)
    assert [decoder.feed(byte) for byte in "é😀".encode()[:-1]] == ["", "é", "", "", ""]
    assert decoder.flush() == "\ufffd"


@pytest.mark.local
def test_four_emoji_keep_all_tokens(smollm2: PreparedModel):
    tokenizer = Tokenizer(smollm2.header)
    ids = tokenizer.encode("😀😀😀😀")
    assert len(ids) > 8
    assert text_of(tokenizer, ids) == "😀😀😀😀"


@pytest.mark.local
@pytest.mark.parametrize(
    "text", ["a\0b", "café naïve", "你好 世界", "1234 5", " \t\n\r\n  x ", "<|im_end|>", "\u2028\x85"]
)
def test_text_round_trips_through_tokens(smollm2: PreparedModel, text: str):
    tokenizer = Tokenizer(smollm2.header)
    ids = tokenizer.encode(text)
    assert text_of(tokenizer, ids) == text
    assert not set(tokenizer.control_tokens.values()) & set(ids)


@pytest.mark.local
@pytest.mark.parametrize("character", ["a", " ", "\n", "é", "1", "."])
def test_long_run_of_one_character_is_handled(smollm2: PreparedModel, character: str):
    tokenizer = Tokenizer(smollm2.header)
    assert text_of(tokenizer, tokenizer.encode(character * 200_000)) == character * 200_000


@pytest.mark.local
def test_digits_are_single_tokens(smollm2: PreparedModel):
    tokenizer = Tokenizer(smollm2.header)
    assert [tokenizer.token_bytes[i] for i in tokenizer.encode("in 2024")] == [b"in", b" ", b"2", b"0", b"2", b"4"]
