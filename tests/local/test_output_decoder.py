from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit.backends.local.inference.output_decoder import OutputDecoder
from responses_kit.backends.local.inference.tokenizer import Tokenizer
from responses_kit.backends.parsing.formats import HERMES
from responses_kit.outputs import LogProb, Output, Reasoning, Text, ToolArguments, ToolCall

from .byte_vocabulary import ByteVocabulary, make_turn, tool

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> ByteVocabulary:
    return ByteVocabulary(tmp_path_factory.mktemp("decoder"))


class ChunkTokenizer(Tokenizer):
    """A tokenizer with the chunks of an answer as its tokens."""

    def __init__(self, chunks: list[bytes], base: Tokenizer) -> None:
        self.__dict__ = base.__dict__ | {"token_bytes": chunks, "control_tokens": {}}


def decode_chunks(
    vocabulary: ByteVocabulary,
    chunks: list[bytes],
    *,
    top: int = 1,
    in_reasoning: bool = False,
    truncated: bool = False,
) -> list[Output]:
    """Return the outputs of an answer with these chunks as its tokens."""
    tokenizer = ChunkTokenizer(chunks, vocabulary.tokenizer)
    tokenizer._is_sentencepiece = False
    turn = make_turn(tools=[tool("f")], logprobs=True, top_logprobs=top)
    decoder = OutputDecoder(tokenizer, HERMES, turn, in_reasoning=in_reasoning)
    assert decoder.logprobs is not None
    outputs: list[Output] = []
    for token in range(len(chunks)):
        decoder.logprobs.add(token, np.arange(len(chunks), dtype=np.float32))
        outputs += decoder.feed(token)
    return [*outputs, *decoder.finish(truncated=truncated)]


def split_at(text: str, ends: list[int]) -> list[bytes]:
    data = text.encode()
    boundaries = sorted({0, len(data), *(end % (len(data) + 1) for end in ends)})
    return [data[start:end] for start, end in pairwise(boundaries)]


def texts(outputs: list[Output]) -> tuple[str, list[LogProb]]:
    pieces = [output for output in outputs if isinstance(output, Text)]
    assert not any(isinstance(output, str) for output in outputs)
    return "".join(piece.text for piece in pieces), [entry for piece in pieces for entry in piece.logprobs]


def bytes_of(entries: list[LogProb]) -> bytes:
    return b"".join(bytes(entry.bytes) for entry in entries)


@given(st.text(max_size=60), st.lists(st.integers(0, 300), max_size=40))
def test_token_bytes_equal_text_bytes_for_any_chunking(vocabulary: ByteVocabulary, text: str, ends: list[int]):
    content, entries = texts(decode_chunks(vocabulary, split_at(text, ends)))
    assert bytes_of(entries) == content.encode()


@given(st.lists(st.integers(0, 300), max_size=60), st.sampled_from(["Well, é. ", "a < b ", ""]))
def test_logprobs_cover_text_only(vocabulary: ByteVocabulary, ends: list[int], text: str):
    outputs = decode_chunks(vocabulary, split_at(f"<think>Hmm é</think>\n\n{text}{CALL}", ends))
    content, entries = texts(outputs)
    assert content.strip() == text.strip()
    assert bytes_of(entries) == content.encode()
    assert "".join(output.text for output in outputs if isinstance(output, Reasoning)) == "Hmm é"
    assert [output.name for output in outputs if isinstance(output, ToolCall)] == ["f"]
    assert "".join(output.delta for output in outputs if isinstance(output, ToolArguments)) == '{"city": "Rome"}'


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=20))
def test_invalid_bytes_keep_logprobs_aligned(vocabulary: ByteVocabulary, pieces: list[bytes]):
    content, entries = texts(decode_chunks(vocabulary, pieces, truncated=True))
    assert bytes_of(entries) == content.encode()


def test_logprob_holds_token_and_top_alternatives(vocabulary: ByteVocabulary):
    outputs = decode_chunks(vocabulary, [b"Hel", b"lo", b" w"], top=2)
    _, entries = texts(outputs)
    expected = np.log(np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum())
    assert [entry.token for entry in entries] == ["Hel", "lo", " w"]
    assert [entry.logprob for entry in entries] == pytest.approx(expected.tolist())
    assert [[one.token for one in entry.top] for entry in entries] == [[" w", "lo"]] * 3
    assert [one.top for one in entries[0].top] == [(), ()]


def test_multi_token_character_keeps_all_tokens(vocabulary: ByteVocabulary):
    outputs = decode_chunks(vocabulary, [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b"])
    assert [output.text for output in outputs if isinstance(output, Text)] == ["a", "😀", "b"]
    _, entries = texts(outputs)
    assert [bytes(entry.bytes) for entry in entries] == [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b"]


def test_token_spanning_text_and_tag_counts_once(vocabulary: ByteVocabulary):
    _, entries = texts(decode_chunks(vocabulary, [b"Hi <tool", CALL[5:].encode()]))
    assert [(entry.token, entry.logprob < 0) for entry in entries] == [("Hi ", True)]
    _, entries = texts(decode_chunks(vocabulary, [b"a <", b"b>"]))
    assert [(entry.token, entry.logprob < 0) for entry in entries] == [("a ", True), ("<", False), ("b>", True)]


def test_text_is_plain_without_logprobs(vocabulary: ByteVocabulary):
    decoder = OutputDecoder(vocabulary.tokenizer, HERMES, make_turn(), in_reasoning=False)
    assert decoder.logprobs is None
    assert [piece for token in vocabulary.tokens("hé") for piece in decoder.feed(token)] == ["h", "é"]


@pytest.mark.parametrize(("content", "reasoning"), [("Hm", True), ("Hm</think>\n\nHello", False)])
def test_reasoning_tokens_are_counted_separately(vocabulary: ByteVocabulary, content: str, reasoning: bool):
    decoder = OutputDecoder(vocabulary.tokenizer, HERMES, make_turn(), in_reasoning=True)
    for token in vocabulary.tokens(content):
        decoder.feed(token)
    assert decoder.is_reasoning is reasoning
