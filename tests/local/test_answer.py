from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit.backends.local.inference.answer import Answer
from responses_kit.backends.local.inference.tokenizer import Tokenizer
from responses_kit.backends.parsing.formats import HERMES
from responses_kit.outputs import LogProb, Output, Reasoning, Text, ToolArguments, ToolCall

from .spelling import Spelling, asking, tool

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Spelling:
    return Spelling(tmp_path_factory.mktemp("answer"))


class Cut(Tokenizer):
    """A vocabulary of whatever pieces an answer is cut into."""

    def __init__(self, pieces: list[bytes], like: Tokenizer) -> None:
        self.__dict__ = like.__dict__ | {"pieces": pieces, "control": {}}


def answered(
    spelling: Spelling, pieces: list[bytes], *, top: int = 1, thinking: bool = False, cut: bool = False
) -> list[Output]:
    """Outputs of an answer whose tokens are some pieces, the n-th with logits of its own."""
    tokenizer = Cut(pieces, spelling.tokenizer)
    tokenizer._spaced = False
    turn = asking(tools=[tool("f")], logprobs=True, top_logprobs=top)
    answer = Answer(tokenizer, HERMES, turn, thinking=thinking)
    assert answer.logprobs is not None
    made: list[Output] = []
    for token in range(len(pieces)):
        answer.logprobs.add(token, np.arange(len(pieces), dtype=np.float32))
        made += answer.feed(token)
    return [*made, *answer.end(cut=cut)]


def cut_up(text: str, ends: list[int]) -> list[bytes]:
    data = text.encode()
    places = sorted({0, len(data), *(end % (len(data) + 1) for end in ends)})
    return [data[start:end] for start, end in pairwise(places)]


def texts(outputs: list[Output]) -> tuple[str, list[LogProb]]:
    pieces = [output for output in outputs if isinstance(output, Text)]
    assert not any(isinstance(output, str) for output in outputs)
    return "".join(piece.text for piece in pieces), [entry for piece in pieces for entry in piece.logprobs]


def bytes_of(entries: list[LogProb]) -> bytes:
    return b"".join(bytes(entry.bytes) for entry in entries)


@given(st.text(max_size=60), st.lists(st.integers(0, 300), max_size=40))
def test_the_tokens_bytes_are_the_texts_bytes_however_it_is_cut(plain: Spelling, text: str, ends: list[int]):
    said, entries = texts(answered(plain, cut_up(text, ends)))
    assert bytes_of(entries) == said.encode()


@given(st.lists(st.integers(0, 300), max_size=60), st.sampled_from(["Well, é. ", "a < b ", ""]))
def test_calls_and_reasoning_have_no_tokens_and_text_has_its_own(plain: Spelling, ends: list[int], text: str):
    made = answered(plain, cut_up(f"<think>Hmm é</think>\n\n{text}{CALL}", ends))
    said, entries = texts(made)
    assert said.strip() == text.strip()
    assert bytes_of(entries) == said.encode()
    assert "".join(output.text for output in made if isinstance(output, Reasoning)) == "Hmm é"
    assert [output.name for output in made if isinstance(output, ToolCall)] == ["f"]
    assert "".join(output.delta for output in made if isinstance(output, ToolArguments)) == '{"city": "Rome"}'


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=20))
def test_bytes_that_make_no_character_are_in_step_too(plain: Spelling, pieces: list[bytes]):
    said, entries = texts(answered(plain, pieces, cut=True))
    assert bytes_of(entries) == said.encode()


def test_a_token_stands_with_its_probability_and_the_likeliest_others(plain: Spelling):
    made = answered(plain, [b"Hel", b"lo", b" w"], top=2)
    _, entries = texts(made)
    expected = np.log(np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum())
    assert [entry.token for entry in entries] == ["Hel", "lo", " w"]
    assert [entry.logprob for entry in entries] == pytest.approx(expected.tolist())
    assert [[one.token for one in entry.top] for entry in entries] == [[" w", "lo"]] * 3
    assert [one.top for one in entries[0].top] == [(), ()]


def test_a_character_of_several_tokens_has_all_of_them(plain: Spelling):
    made = answered(plain, [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b"])
    assert [output.text for output in made if isinstance(output, Text)] == ["a", "😀", "b"]
    _, entries = texts(made)
    assert [bytes(entry.bytes) for entry in entries] == [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b"]


def test_a_token_that_is_half_text_and_half_a_tag_counts_once(plain: Spelling):
    _, entries = texts(answered(plain, [b"Hi <tool", CALL[5:].encode()]))
    assert [(entry.token, entry.logprob < 0) for entry in entries] == [("Hi ", True)]
    _, entries = texts(answered(plain, [b"a <", b"b>"]))
    assert [(entry.token, entry.logprob < 0) for entry in entries] == [("a ", True), ("<", False), ("b>", True)]


def test_without_logprobs_text_is_plain(plain: Spelling):
    answer = Answer(plain.tokenizer, HERMES, asking(), thinking=False)
    assert answer.logprobs is None
    assert [piece for token in plain.tokens("hé") for piece in answer.feed(token)] == ["h", "é"]


@pytest.mark.parametrize(("said", "reasoning"), [("Hm", True), ("Hm</think>\n\nHello", False)])
def test_tokens_of_reasoning_are_told_apart(plain: Spelling, said: str, reasoning: bool):
    answer = Answer(plain.tokenizer, HERMES, asking(), thinking=True)
    for token in plain.tokens(said):
        answer.feed(token)
    assert answer.reasoning is reasoning
