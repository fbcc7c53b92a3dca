from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit.backends.local.inference.tokenizer import CONTROL, NORMAL, USER_DEFINED, Decoder, Tokenizer
from responses_kit.backends.local.model_files import PreparedModel
from responses_kit.backends.parsing.formats import MARKERS

from .conversation import tiny_model

BYTES = [bytes([value]) for value in range(256)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE with five merges and two control tokens."""
    return Tokenizer(tiny_model(tmp_path_factory.mktemp("bpe")).header)


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece; `hi` scores better than `▁h`, and `</s>` could be put together from its parts."""
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


def test_byte_level_merges_make_the_tokens_that_the_model_was_trained_on(tokenizer: Tokenizer):
    assert [tokenizer.pieces[i] for i in tokenizer.encode("hi hi té")] == [b"hi", b" hi", b" t", "é".encode()]


def test_what_the_vocabulary_has_no_token_for_is_left_out_and_does_not_crash(tokenizer: Tokenizer):
    assert text_of(tokenizer, tokenizer.encode("h\0\x04xi")) == "hi"


def test_a_control_token_written_as_text_gives_only_ordinary_tokens(tokenizer: Tokenizer, spaced: Tokenizer):
    assert not set(tokenizer.control.values()) & set(tokenizer.encode("<|im_end|>hi"))
    ids = spaced.encode("hi</s>")
    assert text_of(spaced, ids) == "hi</s>"
    assert not {1, 2} & set(ids)


def test_control_tokens_come_in_as_ids_alone(tokenizer: Tokenizer):
    end = tokenizer.control["<|im_end|>"]
    assert tokenizer.prompt(["hi", end, "", "hi"]) == [*tokenizer.encode("hi"), end, *tokenizer.encode("hi")]
    assert tokenizer.pieces[end] == b""
    assert end in tokenizer.stops


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("token_type", [NORMAL, CONTROL, USER_DEFINED])
def test_tokens_that_mark_calls_and_reasoning_are_text_on_the_way_out_alone(kind: str, token_type: int, tmp_path: Path):
    markers = sorted(MARKERS)
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
        assert tokens[tokenizer.control[marker]] == marker
        assert text_of(tokenizer, [tokenizer.control[marker]]) == marker
        assert not set(tokenizer.control.values()) & set(tokenizer.encode(marker))
        assert text_of(tokenizer, tokenizer.encode(marker)) == marker
    assert text_of(tokenizer, [1, tokenizer.control["<|fim|>"], 2]) == ""


def test_sentencepiece_joins_the_best_scored_pair_first(spaced: Tokenizer):
    assert [spaced.pieces[i] for i in spaced.encode("hi h")] == [b" hi", b" h"]


def test_sentencepiece_spells_unknown_characters_in_bytes(spaced: Tokenizer):
    assert [spaced.pieces[i] for i in spaced.encode("é")] == [b" ", b"\xc3", b"\xa9"]


def test_the_space_that_sentencepiece_adds_is_taken_off_the_answer(spaced: Tokenizer):
    assert text_of(spaced, spaced.encode("hi  hi")) == "hi  hi"


def test_a_prompt_starts_with_bos_once_where_the_model_wants_it(spaced: Tokenizer):
    assert spaced.prompt(["hi"])[0] == 1
    assert spaced.prompt([1, "hi"]) == spaced.prompt(["hi"])


def test_a_lone_surrogate_becomes_a_replacement_character(spaced: Tokenizer):
    assert text_of(spaced, spaced.encode("h\ud83di")) == "h\ufffdi"


@given(st.text(), st.data())
def test_characters_torn_over_tokens_come_out_whole(text: str, data: st.DataObject):
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    decoder = Decoder(chunks)
    pieces = [decoder.feed(token) for token in range(len(chunks))]
    assert "".join(pieces) + decoder.flush() == raw.decode()
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


@given(st.binary())
def test_bytes_that_are_no_text_decode_as_python_does(raw: bytes):
    decoder = Decoder(BYTES)
    assert "".join(map(decoder.feed, raw)) + decoder.flush() == raw.decode("utf-8", "replace")


def test_an_unfinished_character_is_held_back_and_replaced_at_the_end():
    decoder = Decoder(BYTES)
    assert [decoder.feed(byte) for byte in "é😀".encode()[:-1]] == ["", "é", "", "", ""]
    assert decoder.flush() == "\ufffd"


@pytest.mark.local
def test_four_emoji_keep_all_their_tokens(smollm2: PreparedModel):
    tokenizer = Tokenizer(smollm2.header)
    ids = tokenizer.encode("😀😀😀😀")
    assert len(ids) > 8
    assert text_of(tokenizer, ids) == "😀😀😀😀"


@pytest.mark.local
@pytest.mark.parametrize(
    "text", ["a\0b", "café naïve", "你好 世界", "1234 5", " \t\n\r\n  x ", "<|im_end|>", "\u2028\x85"]
)
def test_text_survives_the_way_to_tokens_and_back(smollm2: PreparedModel, text: str):
    tokenizer = Tokenizer(smollm2.header)
    ids = tokenizer.encode(text)
    assert text_of(tokenizer, ids) == text
    assert not set(tokenizer.control.values()) & set(ids)


@pytest.mark.local
@pytest.mark.parametrize("character", ["a", " ", "\n", "é", "1", "."])
def test_a_long_run_of_one_character_does_not_end_the_process(smollm2: PreparedModel, character: str):
    tokenizer = Tokenizer(smollm2.header)
    assert text_of(tokenizer, tokenizer.encode(character * 200_000)) == character * 200_000


@pytest.mark.local
def test_digits_stand_alone_as_the_model_was_trained(smollm2: PreparedModel):
    tokenizer = Tokenizer(smollm2.header)
    assert [tokenizer.pieces[i] for i in tokenizer.encode("in 2024")] == [b"in", b" ", b"2", b"0", b"2", b"4"]
