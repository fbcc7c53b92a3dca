from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from responses_kit import errors
from responses_kit.backends.local.grammar.constraint import GrammarConstraint
from responses_kit.backends.local.inference.engine import Logits
from responses_kit.backends.parsing.formats import BARE, HERMES, CallFormat

from .spelling import END, Spelling, asking, tool

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
def plain(tmp_path_factory: pytest.TempPathFactory) -> Spelling:
    return Spelling(tmp_path_factory.mktemp("constraint"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Spelling:
    return Spelling(tmp_path_factory.mktemp("constraint_marked"), "<think>", "</think>", "<tool_call>", "</tool_call>")


def wishes(spelling: Spelling, *texts: str | int) -> Logits:
    """Logits of a model that wants one of some tokens, the first most."""
    logits = np.zeros(len(spelling.tokenizer.pieces), dtype=np.float32)
    for rank, text in enumerate(reversed(texts), 1):
        logits[spelling.tokens(text)] = rank
    return logits


def said(spelling: Spelling, rules: str | None, limit: int, *wanted: str | int, then: str = "") -> tuple[str, bool]:
    """What a model says that always wants the same tokens, behind what it has said; and whether that is whole."""
    assert rules is not None
    constraint = spelling.grammars.constraint(rules)
    tokens: list[int] = []
    for token in spelling.tokens(then):
        if not constraint.forced(limit, 1):
            assert constraint.accept(token) == token
    while len(tokens) < limit and not constraint.ended:
        made = constraint.forced(limit - len(tokens), 32)
        if not made:
            logits = wishes(spelling, *wanted)
            constraint.mask(logits)
            made = [constraint.accept(int(logits.argmax()))]
        if made == [END]:
            return spelling.text(tokens), True
        tokens += made
    return spelling.text(tokens), constraint.complete


def begun(spelling: Spelling, rules: str | None) -> GrammarConstraint:
    assert rules is not None
    return spelling.grammars.constraint(rules)


# One token at a time.


def test_what_may_not_come_is_masked_and_nothing_else(plain: Spelling):
    constraint = begun(plain, plain.grammar(asking(schema={"enum": ["a", "b"]})))
    constraint.forced(10, 10)
    logits = wishes(plain, "c", "b", "a")
    constraint.mask(logits)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == plain.tokens("ab")
    assert logits[plain.tokens("ab")].tolist() == [1, 2]


def test_logits_beyond_the_vocabulary_are_masked(plain: Spelling):
    constraint = begun(plain, plain.grammar(asking(schema={"enum": ["a", "b"]})))
    logits = np.zeros(len(plain.tokenizer.pieces) + 100, dtype=np.float32)
    constraint.mask(logits)
    assert not np.isfinite(logits[-100:]).any()


def test_a_token_that_may_not_come_is_an_error_that_says_nothing_of_the_schema(
    plain: Spelling, caplog: pytest.LogCaptureFixture
):
    constraint = begun(plain, plain.grammar(asking(schema={"enum": ["s3cret", "x"]})))
    constraint.forced(10, 10)
    with pytest.raises(errors.ModelError, match="could not be held") as caught:
        constraint.accept(plain.tokens("z")[0])
    assert "s3cret" not in caught.value.message
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "s3cret" not in record.getMessage()


def test_a_grammar_that_failed_stays_failed(plain: Spelling):
    constraint = begun(plain, plain.grammar(asking(schema={"enum": ["x", "y"]})))
    constraint.forced(10, 10)
    with pytest.raises(errors.ModelError):
        constraint.accept(plain.tokens("z")[0])
    with pytest.raises(errors.ModelError):
        constraint.mask(wishes(plain, "x"))


def test_forced_tokens_come_at_once_and_no_more_than_wanted(plain: Spelling):
    rules = plain.grammar(asking(schema={"const": {"key": "value"}}))
    assert plain.text(begun(plain, rules).forced(100, 100)) == '{"key": "value"}'
    constraint = begun(plain, rules)
    made = [constraint.forced(100, 3), constraint.forced(2, 100)]
    assert [plain.text(tokens) for tokens in made] == ['{"k', "ey"]
    assert not constraint.ended
    assert plain.text(constraint.forced(100, 100)) == '": "value"}'
    assert constraint.ended
    assert constraint.complete


@pytest.mark.parametrize("text", ["▁", "a▁b", " a", "  ", "é€😀", "\u2028"])
def test_whatever_is_forced_is_spelled_to_the_byte(plain: Spelling, text: str):
    tokens = begun(plain, plain.grammar(asking(schema={"const": text}))).forced(100, 100)
    assert plain.text(tokens) == f'"{text}"'


# Answers that are led to their end.


@pytest.mark.parametrize("wanted", ['a"', "a", ",", "{", "[", '",{', "\\", "9"])
@pytest.mark.parametrize("limit", [70, 100, 400])
def test_json_that_would_run_on_is_led_to_its_end_in_time(plain: Spelling, wanted: str, limit: int):
    text, whole = said(plain, plain.grammar(asking(schema=OPEN_ENDED)), limit, *wanted)
    assert whole
    assert text.endswith("}")


def test_json_is_not_led_while_there_is_room(plain: Spelling):
    text, whole = said(plain, plain.grammar(asking(schema={"type": "string"})), 100, "a")
    assert whole
    assert text == f'"{"a" * 98}"'


@pytest.mark.parametrize("dialect", [HERMES, BARE], ids=lambda dialect: dialect.name)
def test_a_call_is_led_to_its_end_and_so_is_the_row_of_calls(plain: Spelling, dialect: CallFormat):
    rules = plain.grammar(asking(tools=[tool("f")], tool_choice="required"), dialect)
    for wanted in ("a", "\n", '"'):
        text, whole = said(plain, rules, 100, wanted)
        assert whole
        assert text.rstrip().endswith(dialect.tail)


@pytest.mark.parametrize("dialect", [HERMES, BARE], ids=lambda dialect: dialect.name)
def test_free_text_is_never_led(plain: Spelling, dialect: CallFormat):
    for tools, asked in (([tool("f")], {}), ([tool("f")], {"parallel_tool_calls": False})):
        text, whole = said(plain, plain.grammar(asking(tools=tools, **asked), dialect), 60, "a")
        assert (text, whole) == ("a" * 60, False)


def test_a_call_within_text_is_led(plain: Spelling):
    rules = plain.grammar(asking(tools=[tool("f")]))
    text, whole = said(plain, rules, 60, "a", then='Well. <tool_call>\n{"name": "f", "arguments": {"city": "R')
    assert whole
    assert text.rstrip().endswith("</tool_call>")


def test_reasoning_is_not_led_and_what_follows_it_is(marked: Spelling):
    ids = marked.tokenizer.control
    rules = marked.grammar(asking(schema=OPEN_ENDED), reasons=True)
    text, whole = said(marked, rules, 200, ids["<think>"], "a")
    assert (text, whole) == ("<think>" + "a" * 199, False)
    text, whole = said(marked, rules, 200, ids["<think>"], ids["</think>"], "a")
    assert whole
    assert text.startswith('<think></think>\n\n{"text": "aaa')
    rules = marked.grammar(asking(schema=OPEN_ENDED), thinking=True)
    assert said(marked, rules, 50, "a") == ("a" * 50, False)


def test_an_answer_that_may_go_on_is_complete_all_the_same(plain: Spelling):
    constraint = begun(plain, plain.grammar(asking(schema={"type": "integer"})))
    constraint.accept(plain.tokens("1")[0])
    assert (constraint.ended, constraint.complete) == (False, True)


# Compiling.


def test_the_same_grammar_is_compiled_once(plain: Spelling):
    rules = plain.grammar(asking(schema=OPEN_ENDED | {"title": "the same"}))
    assert rules is not None
    before = plain.grammars._compiled.cache_info()
    for _ in range(5):
        plain.grammars.constraint(rules)
    after = plain.grammars._compiled.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 4)
    problems = plain.grammars._known_problem.cache_info()
    plain.grammar(asking(schema=OPEN_ENDED | {"title": "the same"}))
    assert plain.grammars._known_problem.cache_info().misses == problems.misses


def test_answers_in_several_threads_do_not_mix(plain: Spelling):
    rules = plain.grammar(asking(schema=OPEN_ENDED))

    def answer(letter: str) -> tuple[str, bool]:
        return said(plain, rules, 150, letter)

    letters = "abcdefgh" * 4
    with ThreadPoolExecutor(8) as threads:
        for letter, (text, whole) in zip(letters, threads.map(answer, letters, timeout=50), strict=True):
            assert whole
            assert text.startswith(f'{{"text": "{letter * 10}')


def test_free_text_costs_next_to_nothing(plain: Spelling):
    constraint = begun(plain, plain.grammar(asking(tools=[tool(f"f{i}") for i in range(20)])))
    letter = plain.tokens("a")[0]
    logits = wishes(plain, "a")
    times = []
    for left in range(1000, 0, -1):
        started = time.perf_counter()
        constraint.forced(left, 32)
        constraint.mask(logits)
        constraint.accept(letter)
        times.append(time.perf_counter() - started)
    assert sorted(times)[500] < 0.001
