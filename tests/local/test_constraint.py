from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from responses_kit import errors
from responses_kit.backends.local.grammar.constraint import GrammarConstraint
from responses_kit.backends.local.inference.engine import Logits
from responses_kit.backends.parsing.formats import BARE_JSON, HERMES, CallFormat

from .byte_vocabulary import END, ByteVocabulary, make_turn, tool

OPEN_ENDED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "list": {
            "type": "array",
            "items": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        },
        "more": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["text", "list", "more"],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ByteVocabulary:
    return ByteVocabulary(tmp_path_factory.mktemp("constraint"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> ByteVocabulary:
    return ByteVocabulary(
        tmp_path_factory.mktemp("constraint_marked"), "<think>", "</think>", "<tool_call>", "</tool_call>"
    )


def prefer(vocabulary: ByteVocabulary, *texts: str | int) -> Logits:
    """Return logits that prefer some tokens, the first one most."""
    logits = np.zeros(len(vocabulary.tokenizer.token_bytes), dtype=np.float32)
    for rank, text in enumerate(reversed(texts), 1):
        logits[vocabulary.tokens(text)] = rank
    return logits


def generate_text(
    vocabulary: ByteVocabulary, rules: str | None, limit: int, *preferred: str | int, beginning: str = ""
) -> tuple[str, bool]:
    """Return the answer of a model that always prefers the same tokens, and whether the answer is complete.

    Args:
        vocabulary: The vocabulary.
        rules: The grammar.
        limit: The maximum number of tokens.
        preferred: The tokens that the model prefers, the first one most.
        beginning: The beginning of the answer.
    """
    assert rules is not None
    constraint = vocabulary.compiler.compile(rules)
    tokens: list[int] = []
    for token in vocabulary.tokens(beginning):
        if not constraint.accept_forced(limit, 1):
            assert constraint.accept(token) == token
    while len(tokens) < limit and not constraint.is_finished:
        accepted = constraint.accept_forced(limit - len(tokens), 32)
        if not accepted:
            logits = prefer(vocabulary, *preferred)
            constraint.mask(logits)
            accepted = [constraint.accept(int(logits.argmax()))]
        if accepted == [END]:
            return vocabulary.text(tokens), True
        tokens += accepted
    return vocabulary.text(tokens), constraint.is_complete


def start(vocabulary: ByteVocabulary, rules: str | None) -> GrammarConstraint:
    assert rules is not None
    return vocabulary.compiler.compile(rules)


# Single tokens.


def test_constraint_masks_exactly_disallowed_tokens(plain: ByteVocabulary):
    constraint = start(plain, plain.grammar(make_turn(schema={"enum": ["a", "b"]})))
    constraint.accept_forced(10, 10)
    logits = prefer(plain, "c", "b", "a")
    constraint.mask(logits)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == plain.tokens("ab")
    assert logits[plain.tokens("ab")].tolist() == [1, 2]


def test_constraint_masks_logits_beyond_vocabulary(plain: ByteVocabulary):
    constraint = start(plain, plain.grammar(make_turn(schema={"enum": ["a", "b"]})))
    logits = np.zeros(len(plain.tokenizer.token_bytes) + 100, dtype=np.float32)
    constraint.mask(logits)
    assert not np.isfinite(logits[-100:]).any()


def test_disallowed_token_is_error_without_schema(plain: ByteVocabulary, caplog: pytest.LogCaptureFixture):
    constraint = start(plain, plain.grammar(make_turn(schema={"enum": ["s3cret", "x"]})))
    constraint.accept_forced(10, 10)
    with pytest.raises(errors.ModelError, match="could not be held") as caught:
        constraint.accept(plain.tokens("z")[0])
    assert "s3cret" not in caught.value.message
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "s3cret" not in record.getMessage()


def test_failed_grammar_stays_failed(plain: ByteVocabulary):
    constraint = start(plain, plain.grammar(make_turn(schema={"enum": ["x", "y"]})))
    constraint.accept_forced(10, 10)
    with pytest.raises(errors.ModelError):
        constraint.accept(plain.tokens("z")[0])
    with pytest.raises(errors.ModelError):
        constraint.mask(prefer(plain, "x"))


def test_forced_tokens_are_returned_up_to_limit(plain: ByteVocabulary):
    rules = plain.grammar(make_turn(schema={"const": {"key": "value"}}))
    assert plain.text(start(plain, rules).accept_forced(100, 100)) == '{"key": "value"}'
    constraint = start(plain, rules)
    accepted = [constraint.accept_forced(100, 3), constraint.accept_forced(2, 100)]
    assert [plain.text(tokens) for tokens in accepted] == ['{"k', "ey"]
    assert not constraint.is_finished
    assert plain.text(constraint.accept_forced(100, 100)) == '": "value"}'
    assert constraint.is_finished
    assert constraint.is_complete


@pytest.mark.parametrize("text", ["▁", "a▁b", " a", "  ", "é€😀", "\u2028"])
def test_forced_text_is_byte_exact(plain: ByteVocabulary, text: str):
    tokens = start(plain, plain.grammar(make_turn(schema={"const": text}))).accept_forced(100, 100)
    assert plain.text(tokens) == f'"{text}"'


# Completion before the token limit.


@pytest.mark.parametrize("wanted", ['a"', "a", ",", "{", "[", '",{', "\\", "9"])
@pytest.mark.parametrize("limit", [70, 100, 400])
def test_json_is_closed_before_token_limit(plain: ByteVocabulary, wanted: str, limit: int):
    text, is_complete = generate_text(plain, plain.grammar(make_turn(schema=OPEN_ENDED)), limit, *wanted)
    assert is_complete
    assert text.endswith("}")


def test_json_is_unconstrained_while_tokens_remain(plain: ByteVocabulary):
    text, is_complete = generate_text(plain, plain.grammar(make_turn(schema={"type": "string"})), 100, "a")
    assert is_complete
    assert text == f'"{"a" * 98}"'


@pytest.mark.parametrize("call_format", [HERMES, BARE_JSON], ids=lambda call_format: call_format.name)
def test_calls_are_closed_before_token_limit(plain: ByteVocabulary, call_format: CallFormat):
    rules = plain.grammar(make_turn(tools=[tool("f")], tool_choice="required"), call_format)
    for wanted in ("a", "\n", '"'):
        text, is_complete = generate_text(plain, rules, 100, wanted)
        assert is_complete
        assert text.rstrip().endswith(call_format.after_arguments)


@pytest.mark.parametrize("call_format", [HERMES, BARE_JSON], ids=lambda call_format: call_format.name)
def test_free_text_is_never_closed_early(plain: ByteVocabulary, call_format: CallFormat):
    for tools, settings in (([tool("f")], {}), ([tool("f")], {"parallel_tool_calls": False})):
        text, is_complete = generate_text(
            plain, plain.grammar(make_turn(tools=tools, **settings), call_format), 60, "a"
        )
        assert (text, is_complete) == ("a" * 60, False)


def test_call_within_text_is_closed_before_token_limit(plain: ByteVocabulary):
    rules = plain.grammar(make_turn(tools=[tool("f")]))
    text, is_complete = generate_text(
        plain, rules, 60, "a", beginning='Well. <tool_call>\n{"name": "f", "arguments": {"city": "R'
    )
    assert is_complete
    assert text.rstrip().endswith("</tool_call>")


def test_answer_after_reasoning_is_closed_before_token_limit(marked: ByteVocabulary):
    ids = marked.tokenizer.control_tokens
    rules = marked.grammar(make_turn(schema=OPEN_ENDED), may_reason=True)
    text, is_complete = generate_text(marked, rules, 200, ids["<think>"], "a")
    assert (text, is_complete) == ("<think>" + "a" * 199, False)
    text, is_complete = generate_text(marked, rules, 200, ids["<think>"], ids["</think>"], "a")
    assert is_complete
    assert text.startswith('<think></think>\n\n{"text": "aaa')
    rules = marked.grammar(make_turn(schema=OPEN_ENDED), in_reasoning=True)
    assert generate_text(marked, rules, 50, "a") == ("a" * 50, False)


def test_extensible_answer_counts_as_complete(plain: ByteVocabulary):
    constraint = start(plain, plain.grammar(make_turn(schema={"type": "integer"})))
    constraint.accept(plain.tokens("1")[0])
    assert (constraint.is_finished, constraint.is_complete) == (False, True)


# Compilation.


def test_grammar_is_compiled_once(plain: ByteVocabulary):
    rules = plain.grammar(make_turn(schema=OPEN_ENDED | {"title": "the same"}))
    assert rules is not None
    before = plain.compiler._compile_cached.cache_info()
    for _ in range(5):
        plain.compiler.compile(rules)
    after = plain.compiler._compile_cached.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 4)
    problems = plain.compiler._find_problem_cached.cache_info()
    plain.grammar(make_turn(schema=OPEN_ENDED | {"title": "the same"}))
    assert plain.compiler._find_problem_cached.cache_info().misses == problems.misses


def test_constraints_in_several_threads_do_not_mix(plain: ByteVocabulary):
    rules = plain.grammar(make_turn(schema=OPEN_ENDED))

    def answer(letter: str) -> tuple[str, bool]:
        return generate_text(plain, rules, 150, letter)

    letters = "abcdefgh" * 4
    with ThreadPoolExecutor(8) as threads:
        for letter, (text, is_complete) in zip(letters, threads.map(answer, letters, timeout=50), strict=True):
            assert is_complete
            assert text.startswith(f'{{"text": "{letter * 10}')


def test_free_text_has_negligible_overhead(plain: ByteVocabulary):
    constraint = start(plain, plain.grammar(make_turn(tools=[tool(f"f{i}") for i in range(20)])))
    letter = plain.tokens("a")[0]
    logits = prefer(plain, "a")
    times = []
    for remaining in range(1000, 0, -1):
        started = time.perf_counter()
        constraint.accept_forced(remaining, 32)
        constraint.mask(logits)
        constraint.accept(letter)
        times.append(time.perf_counter() - started)
    assert sorted(times)[500] < 0.001
