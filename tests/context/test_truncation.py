"""Tests of truncation to the context window, and of its number of token counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import HostedTool, Model, ResponsesKit, Turn, errors, outputs
from responses_kit.context.truncation import fit_to_window
from responses_kit.schema.items import ITEMS, Item
from responses_kit.schema.request import PlainText
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_response


def user(weight: int = 1) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": "u" * weight}


def system(weight: int = 1, role: str = "system") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": "s" * weight}


def assistant(weight: int = 1) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": "a" * weight}


def call(call_id: str = "c", weight: int = 1) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "c" * weight}


def output(call_id: str = "c", weight: int = 1) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "o" * weight}


def receipt(call_id: str = "c", weight: int = 1) -> dict[str, Any]:
    shape = {"type": "acme:look", "call_id": call_id, "name": "look", "arguments": "{}", "status": "completed"}
    return shape | {"output": "r" * weight}


def reasoning(weight: int = 1) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t" * weight}]}


def compaction(weight: int = 1) -> dict[str, Any]:
    return {"type": "compaction", "encrypted_content": "x" * weight}


def items_of(*given_items: dict[str, Any]) -> list[Item]:
    """Return items with their positions as ids."""
    numbered = [{**item, "id": f"{place}"} for place, item in enumerate(given_items)]
    return ITEMS.validate_python(numbered)


def weight_of(item: Item) -> int:
    """Return the number of tokens of an item, one per character."""
    members = item.model_dump()
    if "content" in members:
        return sum(len(part["text"]) for part in members["content"])
    texts = (members.get(name) for name in ("output", "encrypted_content", "arguments"))
    return next(len(text) for text in texts if text is not None)


class Counter:
    """Counts tokens, and records each call."""

    def __init__(self, answer: int | None = 0) -> None:
        self.calls: list[int] = []
        self.answer = answer

    async def __call__(self, turn: Turn) -> int | None:
        self.calls.append(len(turn.items))
        if self.answer is None:
            return None
        return len(turn.instructions or "") + sum(map(weight_of, turn.items))


def turn_of(items: Sequence[Item], **settings: Any) -> Turn:
    return Turn(**({"model": "m", "items": items, "text_format": PlainText(), "truncation": "auto"} | settings))


def fitted(turn: Turn, window: int | None, counter: Counter | None = None) -> Turn:
    return anyio.run(fit_to_window, turn, window, counter or Counter())


def remaining(*given_items: dict[str, Any], window: int, answer: int = 1, **settings: Any) -> list[int]:
    """Return the positions of the items that remain after truncation."""
    turn = turn_of(items_of(*given_items), max_output_tokens=answer, **settings)
    return [int(item.id) for item in fitted(turn, window).items]


# Whether to truncate at all.


def test_no_count_without_context_window() -> None:
    turn, counter = turn_of(items_of(user(1000))), Counter()
    assert fitted(turn, None, counter) is turn
    assert counter.calls == []


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_turn_is_unchanged_if_backend_cannot_count(truncation: str) -> None:
    turn, counter = turn_of(items_of(user(1000)), truncation=truncation), Counter(None)
    assert fitted(turn, 10, counter) is turn
    assert len(counter.calls) == 1


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_fitting_turn_is_unchanged_and_counted_once(truncation: str) -> None:
    turn, counter = turn_of(items_of(user(3), assistant(3), user(3)), truncation=truncation), Counter()
    assert fitted(turn, 100, counter) is turn
    assert len(counter.calls) == 1


@pytest.mark.parametrize("weight", [10, 11, 10_000])
def test_oversize_turn_is_refused_with_both_token_counts(weight: int) -> None:
    with pytest.raises(errors.ContextLengthExceeded) as caught:
        fitted(turn_of(items_of(user(1), user(weight - 1)), truncation="disabled"), 10)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "input")
    assert f"{weight} tokens" in error.message
    assert "10" in error.message


def test_tight_turn_is_tried_without_truncation() -> None:
    turn = turn_of(items_of(user(9)), truncation="disabled", max_output_tokens=1000)
    assert fitted(turn, 10) is turn


def test_turn_that_cannot_be_shortened_is_refused() -> None:
    for last in (user(10), user(50)):
        with pytest.raises(errors.ContextLengthExceeded):
            fitted(turn_of(items_of(user(5), assistant(5), last)), 10)
    with pytest.raises(errors.ContextLengthExceeded):
        fitted(turn_of(items_of(user(1)), instructions="i" * 20), 10)


def test_original_turn_is_never_modified() -> None:
    turn = turn_of(items_of(user(9), assistant(9), user(1)))
    before = list(turn.items)
    shorter = fitted(turn, 10)
    assert (list(turn.items), len(shorter.items)) == (before, 1)
    assert (shorter.model, shorter.truncation) == (turn.model, turn.truncation)


# Removed and remaining items.


def test_oldest_turns_are_dropped_first() -> None:
    conversation = [user(), assistant(), user(), assistant(), user(), assistant(), user()]
    for window, first in ((8, 0), (7, 2), (6, 2), (5, 4), (4, 4), (3, 6), (2, 6)):
        assert remaining(*conversation, window=window) == list(range(first, 7))


def test_leading_items_are_dropped_with_first_turn() -> None:
    assert remaining(assistant(), reasoning(), user(), assistant(), user(), window=4) == [2, 3, 4]


def test_consecutive_user_messages_form_one_turn() -> None:
    assert remaining(user(), user(), assistant(), user(), user(), window=5) == [3, 4]
    assert remaining(user(3), user(3), assistant(), user(), user(), window=4) == [3, 4]


def test_instructions_system_messages_and_compactions_stay() -> None:
    conversation = [system(), user(), compaction(), assistant(), system(role="developer"), user(), assistant(), user()]
    assert remaining(*conversation, window=6) == [0, 2, 4, 7]
    assert remaining(*conversation, window=8, instructions="ii") == [0, 2, 4, 7]
    assert remaining(*conversation, window=8) == [0, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("answer", [[], [assistant()], [reasoning(), assistant()]])
def test_last_user_message_always_stays(answer: list[dict[str, Any]]) -> None:
    places = remaining(user(5), assistant(5), user(3), *answer, window=7)
    assert places == list(range(2, 3 + len(answer)))


def test_rounds_of_last_turn_are_dropped_after_earlier_turns() -> None:
    rounds = [part for number in range(4) for part in (call(f"c{number}"), output(f"c{number}"))]
    conversation = [user(), assistant(), user(), *rounds]
    assert remaining(*conversation, window=12) == list(range(11))
    assert remaining(*conversation, window=11) == list(range(2, 11))
    assert remaining(*conversation, window=9) == [2, *range(5, 11)]
    assert remaining(*conversation, window=4) == [2, 9, 10]
    with pytest.raises(errors.ContextLengthExceeded):
        remaining(*conversation, window=3)


def test_round_holds_all_parallel_calls() -> None:
    first = [reasoning(), assistant(), call("a"), call("b"), output("b"), output("a")]
    second = [reasoning(), call("c"), output("c")]
    assert remaining(user(), *first, *second, window=9) == [0, 7, 8, 9]


def test_hosted_tool_receipts_form_rounds() -> None:
    rounds = [reasoning(), receipt("a"), reasoning(), receipt("b"), reasoning(), receipt("c")]
    assert remaining(user(), *rounds, window=7) == [0, 3, 4, 5, 6]
    assert remaining(user(), *rounds, window=4) == [0, 5, 6]


def test_last_round_stays_without_user_message() -> None:
    assert remaining(call("a", 5), output("a", 5), call("b"), output("b"), window=8) == [2, 3]


# Calls and their outputs.


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ([user(9), call("a"), output("a"), user(), assistant(), user()], [3, 4, 5]),
        ([user(9), call("a"), user(), output("a"), assistant(), user()], [2, 4, 5]),
        ([user(9), call("a"), user(), output("a")], [2]),
        ([user(9), output("a"), user(), call("a"), assistant(), user()], [2, 4, 5]),
        ([user(9), call("a"), call("b"), output("b"), user(), output("a"), user()], [4, 6]),
    ],
)
def test_call_and_output_are_removed_together(conversation: list[dict[str, Any]], expected: list[int]) -> None:
    assert remaining(*conversation, window=9) == expected


def test_calls_with_same_id_are_distinguished_by_order() -> None:
    conversation = [user(9), call("call_0"), output("call_0"), user(), call("call_0"), output("call_0")]
    assert remaining(*conversation, window=9) == [3, 4, 5]


# Tokens reserved for the answer.


@pytest.mark.parametrize(
    ("max_output_tokens", "room"), [(None, 75), (1, 99), (20, 80), (50, 50), (51, 50), (100, 50), (10_000, 50)]
)
def test_answer_room_is_reserved_up_to_half_of_window(max_output_tokens: int | None, room: int) -> None:
    for last, first in ((room - 2, 0), (room - 1, 1)):
        turn = turn_of(items_of(assistant(), user(last), user(1)), max_output_tokens=max_output_tokens)
        assert len(fitted(turn, 100).items) == 3 - first


def test_turn_with_little_answer_room_is_tried_if_nothing_can_be_dropped() -> None:
    assert remaining(user(9), assistant(9), user(8), window=10, answer=5) == [2]


# Arbitrary conversations: truncation is minimal and needs few counts.


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Draw a conversation and the positions of its removable parts, in order of removal."""
    weights = st.integers(0, 5)
    items: list[dict[str, Any]] = []
    parts: list[list[int]] = []
    count = draw(st.integers(1, 5))
    calls = 0

    def add_protected() -> None:
        for make in draw(st.lists(st.sampled_from([system, compaction]), max_size=1)):
            items.append(make(draw(weights)))

    def add_round() -> None:
        nonlocal calls
        if draw(st.booleans()):
            items.append(reasoning(draw(weights)))
        if draw(st.booleans()):
            items.append(receipt(f"c{calls}", draw(weights)))
        else:
            items.extend([call(f"c{calls}", draw(weights)), output(f"c{calls}", draw(weights))])
        calls += 1

    def add_part(start: int) -> None:
        places = range(start, len(items))
        parts.append(
            [place for place in places if items[place].get("role") != "system" and items[place]["type"] != "compaction"]
        )

    for number in range(count):
        start = len(items)
        if number == 0:
            add_protected()
        items.extend(user(draw(weights)) for _ in range(draw(st.integers(1, 2))))
        if number < count - 1:
            add_protected()
            for _ in range(draw(st.integers(0, 2))):
                add_round()
            items.append(assistant(draw(weights)))
            add_part(start)
            continue
        rounds = draw(st.integers(0, 3))
        for left in reversed(range(rounds)):
            start = len(items)
            add_round()
            if left:
                add_part(start)
    return items, parts


@given(drawn=conversations(), window=st.integers(2, 60), answer=st.integers(1, 40))
def test_minimal_truncation_needs_few_counts(
    drawn: tuple[list[dict[str, Any]], list[list[int]]], window: int, answer: int
) -> None:
    conversation, parts = drawn
    turn = turn_of(items_of(*conversation), max_output_tokens=answer)
    room = window - min(answer, window // 2)

    def without(number: int) -> list[Item]:
        removed = {place for part in parts[:number] for place in part}
        return [item for place, item in enumerate(turn.items) if place not in removed]

    ways = [without(number) for number in range(len(parts) + 1)]
    fitting = [way for way in ways if sum(map(weight_of, way)) <= room]
    expected = fitting[0] if fitting else ways[-1] if sum(map(weight_of, ways[-1])) < window else None
    counter = Counter()
    if expected is None:
        with pytest.raises(errors.ContextLengthExceeded):
            fitted(turn, window, counter)
    else:
        assert list(fitted(turn, window, counter).items) == expected
    assert len(counter.calls) <= 3 + math.ceil(math.log2(len(parts) + 1))


def test_long_conversation_needs_few_counts() -> None:
    conversation = [part for _ in range(1000) for part in (user(), assistant())]
    turn, counter = turn_of(items_of(*conversation, user()), max_output_tokens=1), Counter()
    assert len(fitted(turn, 301, counter).items) == 299
    assert len(counter.calls) <= 13


# Through the kit.

anyio_both = pytest.mark.anyio


class CountingBackend(ScriptedBackend):
    """A backend that counts a token per character and records admitted turns."""

    def __init__(self, *scripts: Any, window: int | None = 40) -> None:
        super().__init__(*scripts, models=[Model("small", context_window=window, tools=True)])
        self.admitted: list[Turn] = []
        self.failure: Exception | None = None

    async def count_tokens(self, turn: Turn) -> int | None:
        if self.failure is not None:
            raise self.failure
        return sum(len(str(message["content"])) for message in turn.messages())

    async def admit(self, turn: Turn) -> None:
        self.admitted.append(turn)


class RecordingStore(MemoryStore):
    """Remembers that something was remaining."""

    def __init__(self) -> None:
        super().__init__()
        self.created = 0

    async def create(self, owner: str, record: Any) -> None:
        self.created += 1
        await super().create(owner, record)


@anyio_both
async def test_oversize_request_is_refused_before_storage_and_generation() -> None:
    backend, store = CountingBackend(["Hi"]), RecordingStore()
    kit = ResponsesKit(backend, store=store)
    with pytest.raises(errors.ContextLengthExceeded) as caught:
        await kit.service.create_run({"input": "x" * 40})
    assert caught.value.payload()["code"] == "context_length_exceeded"
    assert (backend.turns, backend.admitted, store.created) == ([], [], 0)
    check_response(await kit.create({"input": "x" * 39}))


@anyio_both
async def test_auto_truncation_keeps_stored_conversation_and_echo() -> None:
    backend = CountingBackend(["y" * 10])
    kit = ResponsesKit(backend)
    first = await kit.create({"input": "a" * 15, "instructions": "b"})
    body = {"input": "c" * 15, "truncation": "auto", "previous_response_id": first["id"], "max_output_tokens": 16}
    second = await kit.create(body)
    check_response(second)
    assert second["truncation"] == "auto"
    assert [message["content"] for message in backend.turns[-1].messages()] == ["c" * 15]
    assert backend.admitted[-1] is backend.turns[-1], "the admitted turn differs from the generated one"
    third = {"input": "d", "previous_response_id": second["id"], "truncation": "disabled"}
    with pytest.raises(errors.ContextLengthExceeded):
        await kit.create(third)
    await kit.create(third | {"truncation": "auto", "max_output_tokens": 16})
    assert [message["content"] for message in backend.turns[-1].messages()] == ["d"]


@anyio_both
async def test_backend_without_count_refuses_by_itself() -> None:
    backend = CountingBackend(["Hi"])
    backend.failure = RuntimeError("no tokenizer for secret-model")
    kit = ResponsesKit(backend)
    with pytest.raises(errors.ModelError) as caught:
        await kit.create({"input": "Hi"})
    assert "secret" not in caught.value.message
    backend.failure = errors.TooManyRequests("The queue is full.")
    with pytest.raises(errors.TooManyRequests):
        await kit.create({"input": "Hi"})


async def _look(q: str) -> str:
    return "r" * 8


def kit_with_tool(backend: CountingBackend) -> ResponsesKit:
    return ResponsesKit(backend, tools=[HostedTool.from_function("acme:look", _look, name="look", description="")])


def look(number: int) -> outputs.ToolCall:
    return outputs.ToolCall("look", f'{{"q": "{number}"}}')


@anyio_both
async def test_later_rounds_are_truncated_but_stored_whole() -> None:
    backend = CountingBackend([look(1)], [look(2)], [look(3)], [look(4)], ["Done."], window=40)
    kit = kit_with_tool(backend)
    body = {"input": "q" * 8, "tools": [{"type": "acme:look"}], "truncation": "auto", "max_output_tokens": 16}
    response = await kit.create(body)
    check_response(response)
    assert [item["type"] for item in response["output"]] == ["acme:look"] * 4 + ["message"]
    shown = [[message["role"] for message in turn.messages()] for turn in backend.turns]
    assert [roles.count("tool") for roles in shown] == [0, 1, 2, 2, 2]
    assert all(roles[0] == "user" for roles in shown)
    for turn in backend.turns[1:]:
        receipts = [item.id for item in turn.items if item.type == "acme:look"]
        assert receipts[-1] == response["output"][turn.round - 1]["id"], "the latest receipt was removed"


@anyio_both
async def test_oversize_later_round_fails_response() -> None:
    backend = CountingBackend([look(1)], [look(2)], ["Done."], window=20)
    kit = kit_with_tool(backend)
    with pytest.raises(errors.ContextLengthExceeded):
        await kit.create({"input": "q" * 8, "tools": [{"type": "acme:look"}], "truncation": "disabled"})
    assert len(backend.turns) == 2
