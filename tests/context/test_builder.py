"""From a request to a turn: what the model is given, what the response echoes, what is refused up front."""

from __future__ import annotations

from typing import Any

import pytest

from responses_kit import Model, ResponsesKit, Turn, errors, outputs
from responses_kit.protocol.encryption import Encryptor
from responses_kit.schema.items import Compaction
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_response

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

EVERYTHING: dict[str, bool] = {
    "vision": True,
    "tools": True,
    "reasoning": True,
    "structured_output": True,
    "logprobs": True,
}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
SUB = {"type": "function", "name": "sub"}
IMAGE = {"type": "input_image", "image_url": "https://example.org/cat.png"}
SECRET = "the secret of these tests"


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text, **more}


class House:
    """A kit around a script, and the turns that came of it."""

    def __init__(self, *scripts: Any, **abilities: Any) -> None:
        model = Model("scripted", **(EVERYTHING | abilities))
        self.backend = ScriptedBackend(*(scripts or (["Yes."],)), models=[model, "plain"])
        self.kit = ResponsesKit(self.backend, secrets=[SECRET])

    async def ask(self, given: Any = "Hi", *, owner: str = "", **body: Any) -> dict[str, Any]:
        response = await self.kit.create({"input": given, **body}, owner=owner)
        check_response(response)
        return response

    async def refused(self, given: Any = "Hi", *, owner: str = "", **body: Any) -> errors.APIError:
        with pytest.raises(errors.InvalidRequest) as caught:
            await self.kit.create({"input": given, **body}, owner=owner)
        assert len(caught.value.message) < 300
        return caught.value

    @property
    def turn(self) -> Turn:
        return self.backend.turns[-1]

    @property
    def heard(self) -> list[tuple[str, Any]]:
        return [(message["role"], message["content"]) for message in self.turn.messages()]


# Input.


async def test_a_text_and_a_list_say_the_same() -> None:
    house = House()
    for given in ("Hi", [user("Hi")], [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]):
        await house.ask(given)
        assert house.heard == [("user", "Hi")]
        assert house.turn.text == "Hi"


@pytest.mark.parametrize("body", [{"input": []}, {"input": None}, {}])
async def test_nothing_to_answer_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        await House().kit.create(body)
    assert caught.value.param == "input"


async def test_instructions_alone_are_enough_to_answer() -> None:
    house = House()
    await house.ask(None, instructions="Tell a joke.")
    assert house.heard == [("system", "Tell a joke.")]


async def test_every_role_reaches_the_model_in_order() -> None:
    house = House()
    roles = ["system", "developer", "user", "assistant", "user"]
    await house.ask([{"role": role, "content": f"{n}"} for n, role in enumerate(roles)], instructions="First.")
    assert house.heard == [
        ("system", "First."),
        ("system", "0"),
        ("system", "1"),
        ("user", "2"),
        ("assistant", "3"),
        ("user", "4"),
    ]


async def test_orphan_and_empty_reasoning_does_no_harm() -> None:
    house = House()
    await house.ask(
        [{"type": "reasoning", "summary": []}, user("Hi"), {"type": "reasoning", "summary": [], "id": "rs_1"}]
    )
    assert house.heard == [("user", "Hi")]
    assert [item.type for item in house.turn.items] == ["reasoning", "message", "reasoning"]


async def test_ids_of_input_items_are_the_servers_own_and_all_different() -> None:
    house = House()
    await house.ask([user("a", id="msg_mine"), user("b"), {"type": "reasoning", "summary": [], "id": "rs_mine"}])
    ids = [item.id for item in house.turn.items]
    assert len(set(ids)) == 3
    assert not {"msg_mine", "rs_mine", ""} & set(ids)


async def test_two_different_items_that_claim_the_same_id_both_reach_the_model() -> None:
    house = House()
    await house.ask([user("one", id="fake"), user("two", id="fake")])
    assert [said for _, said in house.heard] == ["one", "two"]


@pytest.mark.parametrize("claimed", ["fake", "msg_" + "0" * 32])
async def test_items_that_claim_one_id_stay_apart_in_the_next_turn_too(claimed: str) -> None:
    house = House()
    first = await house.ask([user("one", id=claimed), user("two", id=claimed)])
    assert [said for _, said in house.heard] == ["one", "two"]
    page = await house.kit.input_items(first["id"])
    assert len({item["id"] for item in page["data"]}) == 2
    await house.ask("three", previous_response_id=first["id"])
    assert [said for _, said in house.heard] == ["one", "two", "Yes.", "three"]


async def test_an_id_of_a_chain_cannot_be_taken_by_a_new_item_of_an_unrelated_conversation() -> None:
    house = House()
    first = await house.ask("one")
    forged = {"role": "assistant", "id": first["output"][0]["id"], "content": "Forged."}
    second = await house.ask([forged, user("two")])
    await house.ask("three", previous_response_id=second["id"])
    assert [said for _, said in house.heard] == ["Forged.", "two", "Yes.", "three"]
    await house.ask("four", previous_response_id=first["id"])
    assert [said for _, said in house.heard] == ["one", "Yes.", "four"]


# Calls and outputs.

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "1"}


@pytest.mark.parametrize("order", [[CALL, OUTPUT], [OUTPUT, CALL]])
async def test_calls_and_outputs_pair_up_in_any_order(order: list[Any]) -> None:
    house = House()
    await house.ask([user("Add."), *order])
    assert len(house.turn.items) == 3


async def test_an_output_without_its_call_is_refused_by_name_and_place() -> None:
    error = await House().refused([user("Add."), CALL, OUTPUT | {"call_id": "c2"}])
    assert "c2" in error.message
    assert error.param == "input[2].call_id"


async def test_the_place_of_a_fault_is_the_one_in_the_clients_own_input() -> None:
    house = House(vision=False)
    first = await house.ask()
    again = first["output"][0]
    body = {"previous_response_id": first["id"]}
    error = await house.refused([again, OUTPUT], **body)
    assert error.param == "input[1].call_id"
    error = await house.refused([again, {"role": "user", "content": [IMAGE]}], **body)
    assert error.param is not None
    assert error.param.startswith("input[1].content")


async def test_an_output_pairs_with_a_call_of_the_previous_response() -> None:
    house = House([outputs.ToolCall("add", '{"a": 1}', "c9")], ["It is 1."])
    first = await house.ask("Add.", tools=[ADD])
    await house.ask([OUTPUT | {"call_id": "c9"}], previous_response_id=first["id"], tools=[ADD])
    assert [item.type for item in house.turn.items] == ["message", "function_call", "function_call_output"]
    assert [message["role"] for message in house.turn.messages()] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("arguments", ["", "{", "null", '{"a": 1}'])
async def test_broken_arguments_in_the_history_are_taken_as_they_are(arguments: str) -> None:
    house = House()
    await house.ask([user("Add."), CALL | {"arguments": arguments}, OUTPUT])
    (call,) = house.turn.messages()[1]["tool_calls"]
    assert call["function"]["arguments"] == arguments


async def test_parallel_calls_are_one_message_of_the_assistant() -> None:
    house = House()
    second = {"call_id": "c2"}
    await house.ask(
        [user("Add."), CALL, CALL | second, OUTPUT, OUTPUT | second | {"output": [{"type": "input_text", "text": "2"}]}]
    )
    messages = house.turn.messages()
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert [(message["tool_call_id"], message["content"]) for message in messages[2:]] == [("c1", "1"), ("c2", "2")]


# Chains.


async def test_a_chain_reaches_the_model_whole_and_in_order() -> None:
    house = House(lambda turn: [turn.text.upper()])
    last = None
    for text in ("one", "two", "three"):
        last = (await house.ask(text, previous_response_id=last))["id"]
    assert [said for _, said in house.heard] == ["one", "ONE", "two", "TWO", "three"]


async def test_a_chain_holds_the_very_items_that_were_told() -> None:
    house = House([outputs.Reasoning("Hm."), "Yes.", outputs.Message("final_answer"), "Really."])
    first = await house.ask()
    await house.ask("Sure?", previous_response_id=first["id"])
    assert [item.id for item in house.turn.items[1:-1]] == [item["id"] for item in first["output"]]


async def test_a_chain_may_be_continued_without_input_and_twice() -> None:
    house = House()
    first = await house.ask("Go on.")
    for _ in range(2):
        await house.ask(None, previous_response_id=first["id"])
        assert [said for _, said in house.heard] == ["Go on.", "Yes."]


async def test_an_item_that_stands_in_the_chain_and_again_in_the_input_reaches_the_model_once() -> None:
    house = House()
    first = await house.ask("one")
    page = await house.kit.input_items(first["id"])
    await house.ask([*page["data"], *first["output"], user("two")], previous_response_id=first["id"])
    assert [said for _, said in house.heard] == ["one", "Yes.", "two"]


async def test_instructions_do_not_carry_over_but_system_messages_do() -> None:
    house = House()
    first = await house.ask([{"role": "developer", "content": "Be brief."}, user("Hi")], instructions="Be a pirate.")
    second = await house.ask("Hi again", previous_response_id=first["id"])
    assert house.turn.instructions is None
    assert second["instructions"] is None
    assert house.heard[0] == ("system", "Be brief.")


@pytest.mark.parametrize("previous", ["resp_unknown", "", "msg_1"])
async def test_an_unknown_previous_response_is_refused_for_good(previous: str) -> None:
    error = await House().refused(previous_response_id=previous)
    assert (error.status, error.code, error.param) == (400, "previous_response_not_found", "previous_response_id")


async def test_a_foreign_previous_response_is_as_unknown_as_any() -> None:
    house = House()
    theirs = await house.ask(owner="ann")
    error = await house.refused(owner="bob", previous_response_id=theirs["id"])
    unknown = await house.refused(owner="bob", previous_response_id="resp_unknown")
    assert error.payload() == unknown.payload()


async def test_a_response_that_was_not_stored_cannot_be_continued() -> None:
    house = House()
    first = await house.ask(store=False)
    assert first["store"] is False
    error = await house.refused(previous_response_id=first["id"])
    assert error.code == "previous_response_not_found"


async def test_a_chain_with_a_gap_is_refused_rather_than_half_remembered() -> None:
    house = House()
    first = await house.ask("one")
    second = await house.ask("two", previous_response_id=first["id"])
    await house.kit.delete(first["id"])
    error = await house.refused("three", previous_response_id=second["id"])
    assert error.code == "previous_response_not_found"


async def test_a_response_in_progress_cannot_be_continued() -> None:
    house = House()
    run = await house.kit.service.create_run({"input": "Hi"})
    error = await house.refused(previous_response_id=run.response["id"])
    assert error.code == "previous_response_in_progress"
    await run.execute(_nobody)
    await house.ask("And now?", previous_response_id=run.response["id"])


async def _nobody(events: list[Any]) -> None:
    """Hears nothing."""


async def test_an_unfinished_response_can_be_continued_with_what_it_had() -> None:
    house = House(["Once upon", outputs.Finish("max_output_tokens")], ["a time."])
    first = await house.ask("Emit.")
    await house.ask("Go on.", previous_response_id=first["id"])
    assert [said for _, said in house.heard] == ["Emit.", "Once upon", "Go on."]


# Item references.


def reference(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


async def test_a_reference_stands_for_an_item_of_input_or_output() -> None:
    house = House()
    first = await house.ask("one")
    (given,) = (await house.kit.input_items(first["id"]))["data"]
    await house.ask([reference(given["id"]), {"id": first["output"][0]["id"]}, user("two")])
    assert [said for _, said in house.heard] == ["one", "Yes.", "two"]
    assert [item.id for item in house.turn.items[:2]] == [given["id"], first["output"][0]["id"]]


async def test_a_reference_into_the_chain_brings_nothing_twice() -> None:
    house = House()
    first = await house.ask("one")
    await house.ask([reference(first["output"][0]["id"]), user("two")], previous_response_id=first["id"])
    assert [said for _, said in house.heard] == ["one", "Yes.", "two"]


@pytest.mark.parametrize("reference_first", [True, False])
async def test_a_reference_to_an_item_of_the_same_input_is_that_item(reference_first: bool) -> None:
    house = House()
    pair = [reference("mine"), user("one", id="mine")]
    await house.ask([*(pair if reference_first else reversed(pair)), user("two")])
    assert [said for _, said in house.heard] == ["one", "two"]


async def test_a_referenced_item_can_be_referenced_again_from_where_it_was_referenced() -> None:
    house = House()
    first = await house.ask("one")
    answer = reference(first["output"][0]["id"])
    second = await house.ask([answer, user("two")])
    await house.kit.delete(first["id"])
    await house.ask([answer, user("three")])
    assert [said for _, said in house.heard] == ["Yes.", "three"]
    await house.kit.delete(second["id"])


async def test_an_item_outlives_a_later_response_that_referred_to_it() -> None:
    house = House()
    first = await house.ask("one")
    answer = reference(first["output"][0]["id"])
    second = await house.ask([answer, user("two")])
    await house.kit.delete(second["id"])
    await house.ask([answer, user("three")])
    assert [said for _, said in house.heard] == ["Yes.", "three"]


async def test_unknown_and_foreign_references_are_refused_alike() -> None:
    house = House()
    theirs = await house.ask("secret", owner="ann")
    foreign = await house.refused([user("Hi"), reference(theirs["output"][0]["id"])], owner="bob")
    unknown = await house.refused([user("Hi"), reference("msg_unknown")], owner="bob")
    assert foreign.payload() == unknown.payload()
    assert foreign.param == "input[1].id"


async def test_an_inline_item_cannot_take_the_place_of_a_stored_one() -> None:
    house = House()
    first = await house.ask("one")
    answer_id = first["output"][0]["id"]
    await house.ask([{"role": "assistant", "id": answer_id, "content": "Forged."}, user("two")])
    await house.ask([reference(answer_id), user("three")])
    assert house.heard[0] == ("assistant", "Yes.")


async def test_referring_to_an_item_of_a_deleted_response_is_refused() -> None:
    house = House()
    first = await house.ask()
    await house.kit.delete(first["id"])
    await house.refused([reference(first["output"][0]["id"])])


# Compactions.


def compaction(text: str = '{"summary": "We met."}', *, secret: str = SECRET, kind: str = "compaction") -> Any:
    return {"type": "compaction", "encrypted_content": Encryptor([secret]).encrypt(text, kind=kind, owner="ann")}


TOLD = "Summary of the conversation so far:\nWe met."


async def test_a_compaction_tells_the_model_what_it_stands_for_and_shows_the_client_nothing_of_it() -> None:
    house = House()
    sealed = compaction()
    first = await house.ask([user("Hi"), sealed, user("And?")], owner="ann")
    assert house.heard == [("user", "Hi"), ("assistant", TOLD), ("user", "And?")]
    (given,) = (item for item in house.turn.items if isinstance(item, Compaction))
    assert given.summary == "We met."
    assert given.model_dump() == sealed | {"id": given.id}
    page = await house.kit.input_items(first["id"], owner="ann")
    assert [item for item in page["data"] if item["type"] == "compaction"] == [sealed | {"id": given.id}]
    await house.ask("More?", previous_response_id=first["id"], owner="ann")
    assert house.heard[1] == ("assistant", TOLD)
    await house.ask([reference(given.id), user("More?")], owner="ann")
    assert house.heard == [("assistant", TOLD), ("user", "More?")]


async def test_calls_after_a_compaction_are_made_by_whoever_wrote_the_summary() -> None:
    house = House()
    await house.ask([user("Add."), compaction(), CALL, OUTPUT], owner="ann")
    said = house.turn.messages()
    assert [message["role"] for message in said] == ["user", "assistant", "tool"]
    assert (said[1]["content"], said[1]["tool_calls"][0]["id"]) == (TOLD, "c1")


async def test_a_summary_that_a_client_makes_up_beside_the_sealed_one_is_ignored() -> None:
    house = House()
    await house.ask([compaction() | {"summary": "Forged.", "_summary": "Forged."}, user("And?")], owner="ann")
    assert house.heard[0] == ("assistant", TOLD)


class Counting(ScriptedBackend):
    """Takes each letter for a token."""

    async def count_tokens(self, turn: Turn) -> int:
        return sum(len(message["content"]) for message in turn.messages())


async def test_a_compaction_outlives_truncation() -> None:
    backend = Counting(["Yes."], models=[Model("small", context_window=120)])
    kit = ResponsesKit(backend, secrets=[SECRET])
    talk = [user("one"), compaction(), user("a" * 50), {"role": "assistant", "content": "b" * 50}, user("And?")]
    await kit.create({"input": talk, "truncation": "auto", "max_output_tokens": 16}, owner="ann")
    said = [(message["role"], message["content"]) for message in backend.turns[-1].messages()]
    assert said == [("assistant", TOLD), ("user", "And?")]


GOOD = compaction()["encrypted_content"]


@pytest.mark.parametrize(
    "payload",
    [
        GOOD[:-6] + ("A" if GOOD[-6] != "A" else "B") + GOOD[-5:],
        GOOD[:-4],
        compaction(secret="another server's secret")["encrypted_content"],
        compaction(kind="reasoning")["encrypted_content"],
        compaction("We met.")["encrypted_content"],
        compaction('{"summary": 1}')["encrypted_content"],
        compaction("[]")["encrypted_content"],
        compaction("{}")["encrypted_content"],
        "gAAAAABpM0Yj-sealed-elsewhere",
        "",
    ],
    ids=["changed", "cut", "secret", "kind", "no JSON", "no text", "no object", "no summary", "elsewhere", "nothing"],
)
async def test_a_compaction_that_cannot_be_opened_is_refused_rather_than_forgotten(payload: str) -> None:
    house = House()
    error = await house.refused([user("Hi"), compaction() | {"encrypted_content": payload}, user("?")], owner="ann")
    assert (error.code, error.param) == ("invalid_encrypted_content", "input[1].encrypted_content")
    assert not payload or payload not in error.message
    assert "Send the messages" in error.message
    assert house.backend.turns == []


async def test_a_compaction_is_its_owners_alone() -> None:
    error = await House().refused([compaction(), user("Hi")], owner="bob")
    assert (error.code, error.param) == ("invalid_encrypted_content", "input[0].encrypted_content")


async def test_a_compaction_in_the_chain_whose_secret_is_gone_is_refused_by_the_field_that_leads_there() -> None:
    house = House()
    first = await house.ask([compaction(), user("Hi")], owner="ann")
    later = ResponsesKit(ScriptedBackend(["Yes."]), store=house.kit.store, secrets=["a new secret altogether"])
    with pytest.raises(errors.InvalidRequest) as caught:
        await later.create({"input": "And?", "previous_response_id": first["id"]}, owner="ann")
    assert (caught.value.code, caught.value.param) == ("invalid_encrypted_content", "previous_response_id")


# What a model can't do.


async def test_an_unknown_model_is_refused_and_none_means_the_first() -> None:
    house = House()
    assert (await house.refused(model="other")).code == "model_not_found"
    assert (await house.ask())["model"] == "scripted"
    assert (await house.ask(model="plain"))["model"] == "plain"


@pytest.mark.parametrize(
    ("ability", "body", "param"),
    [
        (
            "vision",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Look"}, IMAGE]}]},
            "input[0].content[1]",
        ),
        ("vision", {"input": [user("Hi"), CALL, OUTPUT | {"output": [IMAGE]}]}, "input[2].output[0]"),
        (
            "vision",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "QQ=="}]}]},
            "input[0].content[0]",
        ),
        ("tools", {"tools": [ADD]}, "tools"),
        ("structured_output", {"text": {"format": {"type": "json_object"}}}, "text.format"),
        ("structured_output", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ("logprobs", {"top_logprobs": 1}, "top_logprobs"),
        ("logprobs", {"include": ["message.output_text.logprobs"]}, "include"),
        ("reasoning", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
)
async def test_what_the_model_cannot_do_is_refused_with_the_field_and_done_where_it_can(
    ability: str, body: dict[str, Any], param: str
) -> None:
    request = {"given": "Hi", **body}
    request["given"] = request.pop("input", "Hi")
    error = await House(**{ability: False}).refused(**request)
    assert (error.code, error.param) == ("unsupported_parameter", param)
    await House(["{}"]).ask(**request)


async def test_a_picture_in_the_chain_is_refused_by_a_model_that_cannot_see() -> None:
    house = House()
    first = await house.ask([{"role": "user", "content": [IMAGE]}])
    error = await house.refused(model="plain", previous_response_id=first["id"])
    assert error.param == "previous_response_id"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
async def test_what_this_server_does_not_do_is_refused(body: dict[str, Any], param: str) -> None:
    assert (await House().refused(**body)).param == param


@pytest.mark.parametrize("effort", [None, "none"])
async def test_asking_a_model_without_reasoning_not_to_reason_is_fine(effort: str | None) -> None:
    response = await House(reasoning=False).ask(reasoning={"effort": effort})
    assert response["reasoning"] == {"effort": effort, "summary": None}


# Tools.


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "mcp",
        "image_generation",
        "computer_use_preview",
        "acme:search",
    ],
)
async def test_a_tool_that_the_server_would_have_to_run_is_refused(kind: str) -> None:
    error = await House().refused(tools=[ADD, {"type": kind, "server_url": "https://example.org"}])
    assert (error.code, error.param) == ("unsupported_parameter", "tools[1].type")


@pytest.mark.parametrize("kind", ["custom", "namespace", "local_shell", "apply_patch"])
async def test_a_tool_of_the_clients_own_kind_is_left_out_of_prompt_and_echo(kind: str) -> None:
    house = House()
    response = await house.ask(tools=[{"type": kind, "name": "x", "tools": [1]}, ADD])
    assert [tool["name"] for tool in response["tools"]] == ["add"]
    assert [tool.name for tool in house.turn.tools] == ["add"]


async def test_tools_are_echoed_whole() -> None:
    response = await House().ask(tools=[ADD, SUB])
    assert response["tools"] == [ADD, SUB | {"description": None, "parameters": None, "strict": None}]


async def test_an_output_that_no_call_asked_for_stands_for_a_call_if_it_has_a_name() -> None:
    house = House(["Fine."])
    told = {"type": "function_call_output", "name": "goal", "output": "Win."}
    first = await house.ask([{"role": "user", "content": "Hi"}, told, told])
    await house.ask("Go on.", previous_response_id=first["id"])
    for turn in house.backend.turns:
        _, one, result, other, again, *_ = turn.messages()
        (call,), (second,) = one["tool_calls"], other["tool_calls"]
        assert (call["function"], result["content"]) == ({"name": "goal", "arguments": "{}"}, "Win.")
        assert result["tool_call_id"] == call["id"] != second["id"] == again["tool_call_id"]
    assert (await house.refused([told | {"name": None}])).param == "input[0].call_id"
    assert (await house.refused([{"type": "function_call_output", "output": "Win."}])).param == "input[0].call_id"


async def test_strict_functions_whose_schemas_are_too_large_together_are_refused() -> None:
    parameters = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}
    tools = [{"type": "function", "name": f"f{number}", "parameters": parameters} for number in range(50)]
    await House().ask(tools=tools)
    refusal = await House().refused(tools=[tool | {"strict": True} for tool in tools])
    assert (refusal.param, refusal.code) == ("tools", "invalid_request")


async def test_two_tools_of_one_name_are_refused() -> None:
    assert (await House().refused(tools=[ADD, SUB, ADD])).param == "tools[2]"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function", "name": "mul"}, "tool_choice.name"),
        (
            {
                "type": "allowed_tools",
                "tools": [{"type": "function", "name": "add"}, {"type": "function", "name": "mul"}],
            },
            "tool_choice.tools[1].name",
        ),
    ],
)
async def test_a_tool_choice_that_names_no_tool_of_the_request_is_refused(choice: Any, param: str) -> None:
    assert (await House().refused(tools=[ADD, SUB], tool_choice=choice)).param == param


async def test_a_tool_cannot_be_required_where_there_are_none() -> None:
    assert (await House().refused(tool_choice="required")).param == "tool_choice"
    assert (
        await House().refused(tool_choice="required", tools=[{"type": "custom", "name": "x"}])
    ).param == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "script"),
    [
        ("none", ["Yes."]),
        ("auto", ["Yes."]),
        ("required", [outputs.ToolCall("add")]),
        ({"type": "function", "name": "add"}, [outputs.ToolCall("add")]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            [outputs.ToolCall("add")],
        ),
    ],
)
async def test_a_tool_choice_is_echoed_as_it_was_applied(choice: Any, script: list[outputs.Output]) -> None:
    house = House(script)
    assert (await house.ask(tools=[ADD], tool_choice=choice))["tool_choice"] == choice
    assert house.turn.must_call is (script != ["Yes."])


async def test_tools_that_may_not_be_called_do_not_trouble_a_model_without_tools() -> None:
    await House(tools=False).ask(tools=[ADD], tool_choice="none")


# The form of the answer, and what is echoed.


@pytest.mark.parametrize(
    ("given", "told", "echoed"),
    [
        (None, "text", {"type": "text"}),
        ({"type": "text"}, "text", {"type": "text"}),
        ({"type": "json_object"}, "json_object", {"type": "json_object"}),
        ({"type": "json_schema"}, "json_object", {"type": "json_object"}),
        ({"type": "json_schema", "name": "x", "schema": None}, "json_object", {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}},
            "json_schema",
            {"type": "json_schema", "name": "x", "description": None, "schema": None, "strict": False},
        ),
        (
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True, "description": "An x."},
            "json_schema",
            {"type": "json_schema", "name": "x", "description": "An x.", "schema": None, "strict": True},
        ),
        (
            {"type": "json_schema", "schema": {"type": "object"}},
            "json_schema",
            {"type": "json_schema", "name": "", "description": None, "schema": None, "strict": False},
        ),
    ],
)
async def test_the_form_of_the_answer_reaches_the_model_whole_and_the_client_in_its_form(
    given: Any, told: str, echoed: dict[str, Any]
) -> None:
    house = House(["{}"])
    response = await house.ask(text={"format": given})
    assert house.turn.text_format.type == told
    assert response["text"] == {"format": echoed}
    if told == "json_schema":
        assert house.turn.text_format.model_dump(by_alias=True)["schema"] == {"type": "object"}


@pytest.mark.parametrize("schema", [{"type": "secretword"}, {"$ref": "https://example.org/secretword"}, {"allOf": 1}])
@pytest.mark.parametrize("place", ["text.format.schema", "tools[1].parameters"])
async def test_a_schema_that_is_none_is_refused_with_its_place_and_none_of_its_words(place: str, schema: Any) -> None:
    house = House()
    if place.startswith("text"):
        body: dict[str, Any] = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    else:
        body = {"tools": [SUB, ADD | {"parameters": schema}]}
    error = await house.refused(**body)
    assert (error.code, error.param) == ("invalid_schema", place)
    assert "secretword" not in error.message
    assert house.backend.turns == []


async def test_a_schema_that_nobody_is_held_to_is_not_judged() -> None:
    await House().ask(tools=[ADD | {"parameters": {"type": "of their own"}, "strict": False}])


async def test_verbosity_is_echoed_where_it_was_given_and_left_out_where_not() -> None:
    assert (await House().ask(text={"verbosity": "low"}))["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (await House().ask(text={"verbosity": None}))["text"] == {"format": {"type": "text"}}


async def test_sampling_values_left_out_are_the_models_own_and_echoed() -> None:
    house = House(temperature=0.2, top_p=0.9)
    response = await house.ask()
    assert (response["temperature"], response["top_p"]) == (house.turn.temperature, house.turn.top_p) == (0.2, 0.9)
    response = await house.ask(temperature=0, top_p=1, presence_penalty=-1, frequency_penalty=0.5)
    assert (response["temperature"], response["top_p"]) == (house.turn.temperature, house.turn.top_p) == (0, 1)
    assert (response["presence_penalty"], response["frequency_penalty"]) == (-1, 0.5)
    assert (house.turn.presence_penalty, house.turn.frequency_penalty) == (-1, 0.5)


async def test_what_was_asked_for_reaches_the_backend_and_the_echo() -> None:
    house = House()
    body: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "top_logprobs": 2,
        "truncation": "auto",
        "metadata": {"k": "v"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "prompt_cache_key": "p",
    }
    response = await house.ask(owner="ann", **body)
    assert {name: response[name] for name in body} == body
    turn = house.turn
    assert (turn.instructions, turn.max_output_tokens, turn.parallel_tool_calls) == ("Be brief.", 50, False)
    assert (turn.top_logprobs, turn.logprobs, turn.truncation) == (2, True, "auto")
    assert (turn.owner, dict(turn.metadata), turn.response_id) == ("ann", {"k": "v"}, response["id"])
    assert turn.reasoning is not None
    assert turn.reasoning.effort == "low"


async def test_no_limit_on_tokens_is_made_up() -> None:
    house = House()
    response = await house.ask()
    assert response["max_output_tokens"] is None
    assert house.turn.max_output_tokens is None


async def test_a_turn_shows_pictures_files_and_videos_in_the_chats_own_shape() -> None:
    house = House()
    parts = [
        {"type": "input_text", "text": "Look:"},
        IMAGE,
        {"type": "input_file", "filename": "a.txt", "file_data": "QQ=="},
        {"type": "input_video", "video_url": "https://example.org/a.mp4"},
    ]
    await house.ask([{"role": "user", "content": parts}])
    assert house.turn.text == "Look:"
    assert house.turn.messages()[0]["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png", "detail": "auto"}},
        {"type": "file", "file": {"filename": "a.txt", "file_data": "QQ=="}},
        {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
    ]


async def test_a_conversation_does_not_grow_beyond_what_a_server_can_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_kit.context.history._LONGEST_CONVERSATION", 20_000)
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    previous, turns = (await kit.create({"input": "Hello"}))["id"], 1
    while turns < 6:
        previous, turns = (await kit.create({"input": "x" * 3000, "previous_response_id": previous}))["id"], turns + 1
    with pytest.raises(errors.ContextLengthExceeded) as refused:
        await kit.create({"input": "And now?", "previous_response_id": previous})
    assert refused.value.param == "previous_response_id"
    assert (await kit.retrieve(str(previous)))["status"] == "completed"
