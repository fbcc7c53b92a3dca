"""Tests of turns: callable tools and chat messages."""

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


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def receipt(**members: Any) -> dict[str, Any]:
    call = {"call_id": "call_1", "name": "look", "arguments": '{"q": "x"}', "output": "found"}
    return {"type": "acme:look", "id": "item_1", "status": "completed"} | call | members


def allowed(*names: str, mode: Any = "auto") -> AllowedTools:
    return AllowedTools(tools=[NamedFunction(name=name) for name in names], mode=mode)


# Callable tools.


@pytest.mark.parametrize(
    ("settings", "callable_names", "must_call"),
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
def test_turn_lists_callable_tools_and_must_call(
    settings: dict[str, Any], callable_names: list[str], must_call: bool
) -> None:
    turn = turn_of(user(), **settings)
    assert [tool.name for tool in turn.callable_tools] == callable_names
    assert turn.must_call is must_call
    assert [tool.name for tool in turn.tools] == [tool.name for tool in settings.get("tools", [ADD, SUB, LOOK])]


def test_unresolved_hosted_tool_allows_nothing() -> None:
    choice = AllowedTools(tools=[NamedHosted(type="acme:look"), NamedFunction(name="add")])
    assert [tool.name for tool in turn_of(user(), tool_choice=choice).callable_tools] == ["add"]


@pytest.mark.parametrize(
    ("parallel", "max_tool_calls", "calls"),
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
def test_turn_gives_max_calls(parallel: bool, max_tool_calls: int | None, calls: int | None) -> None:
    assert turn_of(user(), parallel_tool_calls=parallel, max_tool_calls=max_tool_calls).max_calls == calls


# Chat messages.


def test_receipt_converts_to_call_and_output() -> None:
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


def test_messages_show_receipt_as_call_and_output() -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"q": "x"}'}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
    for before in ([user()], [user(), reasoning("Hm.")], [user(), assistant("Let me see.")]):
        assert turn_of(*before, receipt()).messages() == turn_of(*before, call, output).messages()


def test_messages_show_error_of_failed_call() -> None:
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
def test_messages_skip_other_extension_items(members: dict[str, Any]) -> None:
    item = {name: value for name, value in receipt(**members).items() if value is not ...}
    assert turn_of(user(), item, assistant("Yes.")).messages() == turn_of(user(), assistant("Yes.")).messages()


@given(
    members=st.dictionaries(st.sampled_from(["call_id", "name", "arguments", "output", "query", "copy"]), json_values)
)
def test_messages_handle_any_extension_item(members: dict[str, Any]) -> None:
    item = ExtensionItem.model_validate({"type": "other:thing", "id": "x", **members})
    expected = turn_of(user()).messages()
    chat = Turn(model="m", items=[*turn_of(user()).items, item], text_format=PlainText()).messages()
    assert chat[:1] == expected
    if item.receipt() is None:
        assert chat == expected
    else:
        assert [message["role"] for message in chat[1:]] == ["assistant", "tool"]
        assert all(isinstance(members[name], str) for name in ("call_id", "name", "arguments", "output"))


def test_messages_keep_order_and_pairs_of_receipts() -> None:
    numbered = [receipt(call_id=f"call_{n}", output=f"found {n}", id=f"item_{n}") for n in range(3)]
    chat = turn_of(user(), *numbered).messages()
    call_ids = [call["id"] for message in chat for call in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in chat if message["role"] == "tool"]
    assert call_ids == answered == ["call_0", "call_1", "call_2"]


def test_messages_attach_reasoning_to_next_message_or_call() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "2"}
    chat = turn_of(
        user(),
        reasoning("First."),
        assistant("Let me see."),
        call,
        reasoning("Then."),
        call,
        output,
        reasoning("So."),
        assistant("2."),
    ).messages()
    assert [message.get("reasoning_content") for message in chat if message["role"] == "assistant"] == [
        "First.",
        "Then.",
        "So.",
    ]
    assert turn_of(user(), reasoning("Never sent.")).messages() == turn_of(user()).messages()
    assert (
        turn_of(reasoning("Before."), user(), assistant("Hi.")).messages()
        == turn_of(user(), assistant("Hi.")).messages()
    )


def test_messages_start_with_instructions_and_map_developer_to_system() -> None:
    developer = {"type": "message", "role": "developer", "content": "Be kind."}
    chat = turn_of(developer, user(), instructions="Be brief.").messages()
    assert [(message["role"], message["content"]) for message in chat] == [
        ("system", "Be brief."),
        ("system", "Be kind."),
        ("user", "Hi"),
    ]


def test_text_is_last_user_message() -> None:
    assert turn_of(user("one"), assistant("two"), user("three"), assistant("four")).text == "three"
    assert turn_of(assistant("two")).text == ""


texts = any_texts.map(replace_surrogates)
_calls = st.sampled_from(["a", "b"])
_items = st.one_of(
    st.builds(user, texts),
    st.builds(assistant, texts),
    st.builds(reasoning, texts),
    st.builds(lambda text: {"type": "message", "role": "system", "content": text}, texts),
    st.builds(lambda call: {"type": "function_call", "call_id": call, "name": "add", "arguments": "{"}, _calls),
    st.builds(lambda call, text: {"type": "function_call_output", "call_id": call, "output": text}, _calls, texts),
    st.builds(lambda call: receipt(call_id=call), _calls),
    st.builds(lambda text: {"type": "compaction", "encrypted_content": text}, texts),
    st.just({"type": "acme:other", "id": "x"}),
)


@given(given_items=st.lists(_items, max_size=8))
def test_messages_contain_any_context_once(given_items: list[dict[str, Any]]) -> None:
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
    contents = [message["content"] for message in chat if message["role"] == "user"]
    assert contents == [item["content"] for item in given_items if item.get("role") == "user"]
    assert all(
        message["role"] == "assistant" for message in chat if {"tool_calls", "reasoning_content"} & message.keys()
    )
