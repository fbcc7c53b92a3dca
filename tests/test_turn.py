"""Turns: what a backend is told may and must be called, and the chat that its context comes to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import Turn
from responses_kit.schema.base import replace_surrogates
from responses_kit.schema.items import ITEMS, ExtensionItem
from responses_kit.schema.request import PlainText
from responses_kit.schema.tools import AllowedTools, FunctionTool, NamedFunction, NamedHosted

from .support.strategies import json_values
from .support.strategies import texts as any_texts

ADD, SUB, LOOK = (FunctionTool(name=name) for name in ("add", "sub", "look"))


def turn_of(*given_items: Any, **settings: Any) -> Turn:
    items = ITEMS.validate_python(list(given_items))
    return Turn(**({"model": "m", "items": items, "text_format": PlainText(), "tools": [ADD, SUB, LOOK]} | settings))


def user(text: str = "Hi") -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def receipt(**members: Any) -> dict[str, Any]:
    whole = {"call_id": "call_1", "name": "look", "arguments": '{"q": "x"}', "output": "found"}
    return {"type": "acme:look", "id": "item_1", "status": "completed"} | whole | members


def allowed(*names: str, mode: Any = "auto") -> AllowedTools:
    return AllowedTools(tools=[NamedFunction(name=name) for name in names], mode=mode)


# What may and must be called.


@pytest.mark.parametrize(
    ("settings", "may", "must"),
    [
        ({}, ["add", "sub", "look"], False),
        ({"tool_choice": "auto"}, ["add", "sub", "look"], False),
        ({"tool_choice": "none"}, [], False),
        ({"tool_choice": "required"}, ["add", "sub", "look"], True),
        ({"tool_choice": NamedFunction(name="sub")}, ["sub"], True),
        ({"tool_choice": allowed("look", "add")}, ["add", "look"], False),
        ({"tool_choice": allowed("add", mode="required")}, ["add"], True),
        ({"tool_choice": allowed("add", mode="none")}, [], False),
        ({"max_tool_calls": 0}, [], False),
        ({"max_tool_calls": 1}, ["add", "sub", "look"], False),
        ({"tools": []}, [], False),
        ({"tool_choice": allowed("unknown")}, [], False),
    ],
)
def test_a_turn_says_which_tools_may_be_called_and_whether_one_must(
    settings: dict[str, Any], may: list[str], must: bool
) -> None:
    turn = turn_of(user(), **settings)
    assert [tool.name for tool in turn.callable_tools] == may
    assert turn.must_call is must
    assert [tool.name for tool in turn.tools] == [tool.name for tool in settings.get("tools", [ADD, SUB, LOOK])]


def test_a_hosted_tool_that_was_not_resolved_allows_nothing_by_accident() -> None:
    choice = AllowedTools(tools=[NamedHosted(type="acme:look"), NamedFunction(name="add")])
    assert [tool.name for tool in turn_of(user(), tool_choice=choice).callable_tools] == ["add"]


@pytest.mark.parametrize(
    ("parallel", "most", "calls"),
    [
        (True, None, None),
        (True, 3, 3),
        (True, 0, 0),
        (False, None, 1),
        (False, 3, 1),
        (False, 1, 1),
        (False, 0, 0),
    ],
)
def test_a_turn_says_how_many_calls_may_be_made(parallel: bool, most: int | None, calls: int | None) -> None:
    assert turn_of(user(), parallel_tool_calls=parallel, max_tool_calls=most).max_calls == calls


# The chat.


def test_a_receipt_is_the_call_and_the_output_that_it_stands_for() -> None:
    chat = turn_of(user("Look."), receipt(), assistant("There.")).messages()
    assert chat == [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"q": "x"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
        {"role": "assistant", "content": "There."},
    ]


def test_a_receipt_is_shown_like_the_call_and_the_output_of_a_function() -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"q": "x"}'}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
    for before in ([user()], [user(), thought("Hm.")], [user(), assistant("Let me see.")]):
        assert turn_of(*before, receipt()).messages() == turn_of(*before, call, output).messages()


def test_a_failed_call_is_shown_with_what_the_model_was_told_of_it() -> None:
    chat = turn_of(user(), receipt(status="failed", output="The tool failed.")).messages()
    assert chat[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "The tool failed."}


@pytest.mark.parametrize(
    "members",
    [
        {"output": None},
        {"output": ...},
        {"output": 7},
        {"output": {"a": 1}},
        {"output": [{"type": "input_text", "text": "x"}]},
        {"name": None},
        {"name": ...},
        {"name": "no name"},
        {"name": ""},
        {"name": 7},
        {"arguments": ...},
        {"arguments": None},
        {"arguments": {"q": "x"}},
        {"call_id": ...},
        {"call_id": ""},
        {"call_id": "x" * 65},
        {"call_id": 7},
    ],
    ids=str,
)
def test_an_extension_item_that_is_no_receipt_has_no_place_in_a_chat(members: dict[str, Any]) -> None:
    whole = {name: value for name, value in receipt(**members).items() if value is not ...}
    assert turn_of(user(), whole, assistant("Yes.")).messages() == turn_of(user(), assistant("Yes.")).messages()


@given(
    members=st.dictionaries(st.sampled_from(["call_id", "name", "arguments", "output", "query", "copy"]), json_values)
)
def test_no_extension_item_ever_troubles_a_chat(members: dict[str, Any]) -> None:
    item = ExtensionItem.model_validate({"type": "other:thing", "id": "x", **members})
    told = turn_of(user()).messages()
    chat = Turn(model="m", items=[*turn_of(user()).items, item], text_format=PlainText()).messages()
    assert chat[:1] == told
    if item.receipt() is None:
        assert chat == told
    else:
        assert [message["role"] for message in chat[1:]] == ["assistant", "tool"]
        assert all(isinstance(members[name], str) for name in ("call_id", "name", "arguments", "output"))


def test_several_receipts_keep_their_order_and_their_pairs() -> None:
    numbered = [receipt(call_id=f"call_{n}", output=f"found {n}", id=f"item_{n}") for n in range(3)]
    chat = turn_of(user(), *numbered).messages()
    made = [call["id"] for message in chat for call in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in chat if message["role"] == "tool"]
    assert made == answered == ["call_0", "call_1", "call_2"]


def test_what_the_model_thought_stands_with_what_it_said_or_called_next() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "2"}
    chat = turn_of(
        user(),
        thought("First."),
        assistant("Let me see."),
        call,
        thought("Then."),
        call,
        output,
        thought("So."),
        assistant("2."),
    ).messages()
    assert [message.get("reasoning_content") for message in chat if message["role"] == "assistant"] == [
        "First.",
        "Then.",
        "So.",
    ]
    assert turn_of(user(), thought("Never said.")).messages() == turn_of(user()).messages()
    assert (
        turn_of(thought("Before."), user(), assistant("Hi.")).messages() == turn_of(user(), assistant("Hi.")).messages()
    )


def test_instructions_lead_the_chat_and_developers_speak_as_the_system() -> None:
    developer = {"type": "message", "role": "developer", "content": "Be kind."}
    chat = turn_of(developer, user(), instructions="Be brief.").messages()
    assert [(message["role"], message["content"]) for message in chat] == [
        ("system", "Be brief."),
        ("system", "Be kind."),
        ("user", "Hi"),
    ]


def test_the_text_is_that_of_the_last_user_message() -> None:
    assert turn_of(user("one"), assistant("two"), user("three"), assistant("four")).text == "three"
    assert turn_of(assistant("two")).text == ""


texts = any_texts.map(replace_surrogates)
_calls = st.sampled_from(["a", "b"])
_items = st.one_of(
    st.builds(user, texts),
    st.builds(assistant, texts),
    st.builds(thought, texts),
    st.builds(lambda text: {"type": "message", "role": "system", "content": text}, texts),
    st.builds(lambda call: {"type": "function_call", "call_id": call, "name": "add", "arguments": "{"}, _calls),
    st.builds(lambda call, text: {"type": "function_call_output", "call_id": call, "output": text}, _calls, texts),
    st.builds(lambda call: receipt(call_id=call), _calls),
    st.builds(lambda text: {"type": "compaction", "encrypted_content": text}, texts),
    st.just({"type": "acme:other", "id": "x"}),
)


@given(given_items=st.lists(_items, max_size=8))
def test_any_context_comes_to_a_chat_that_says_each_thing_once(given_items: list[dict[str, Any]]) -> None:
    turn = turn_of(*given_items)
    chat = turn.messages()
    assert {message["role"] for message in chat} <= {"system", "user", "assistant", "tool"}
    assert all(isinstance(message["content"], str) for message in chat)
    receipts = [item for item in given_items if item["type"] == "acme:look"]
    calls = [call for message in chat for call in message.get("tool_calls", ())]
    assert len(calls) == len(receipts) + sum(item["type"] == "function_call" for item in given_items)
    assert sum(message["role"] == "tool" for message in chat) == len(receipts) + sum(
        item["type"] == "function_call_output" for item in given_items
    )
    said = [message["content"] for message in chat if message["role"] == "user"]
    assert said == [item["content"] for item in given_items if item.get("role") == "user"]
    assert all(
        message["role"] == "assistant" for message in chat if {"tool_calls", "reasoning_content"} & message.keys()
    )
