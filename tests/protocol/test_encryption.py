"""Tests of encrypted payloads, which are bound to an owner, a purpose and a secret."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import ResponsesKit, errors, outputs
from responses_kit.protocol.encryption import Encryptor
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_response, check_stream

SECRET, OTHER = "correct horse battery", "staple, battery, horse"

texts = st.text(max_size=40)


def decrypted(encryptor: Encryptor, payload: str, *, kind: str = "reasoning", owner: str = "ann") -> str | None:
    return encryptor.decrypt(payload, kind=kind, owner=owner, param="input[0].encrypted_content")


def check_refused(encryptor: Encryptor, payload: str, **binding: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        decrypted(encryptor, payload, **binding)
    error = caught.value
    assert (error.param, error.code) == ("input[0].encrypted_content", "invalid_encrypted_content")
    assert payload[:8] not in error.message


@given(text=texts, kind=st.text(max_size=8), owner=st.text(max_size=8))
def test_payload_is_decrypted_in_every_process_with_same_secret(text: str, kind: str, owner: str) -> None:
    payload = Encryptor([SECRET]).encrypt(text, kind=kind, owner=owner)
    assert decrypted(Encryptor([SECRET]), payload, kind=kind, owner=owner) == text


def test_lone_surrogates_are_replaced_before_encryption() -> None:
    encryptor = Encryptor([SECRET])
    assert decrypted(encryptor, encryptor.encrypt("a\ud83d", kind="reasoning", owner="ann")) == "a\ufffd"
    assert decrypted(encryptor, encryptor.encrypt("\ud83d\ude00", kind="reasoning", owner="ann")) == "\U0001f600"


@pytest.mark.parametrize("owner", ["\ud83d", "a\0b", ""])
def test_payload_is_decrypted_for_its_owner_only(owner: str) -> None:
    encryptor = Encryptor([SECRET])
    payload = encryptor.encrypt("text", kind="reasoning", owner=owner)
    assert decrypted(encryptor, payload, owner=owner) == "text"
    check_refused(encryptor, payload, owner=owner + "x")


def test_payload_discloses_nothing_and_is_unique() -> None:
    encryptor = Encryptor([SECRET])
    first, second = (encryptor.encrypt("hidden " * 10, kind="reasoning", owner="ann") for _ in range(2))
    assert first != second
    for payload in (first, second):
        assert payload.startswith("rk1.")
        assert payload.isascii()
        assert b"hidden" not in base64.urlsafe_b64decode(payload.rpartition(".")[2])


def test_payload_is_bound_to_owner_and_purpose() -> None:
    encryptor = Encryptor([SECRET])
    payload = encryptor.encrypt("text", kind="reasoning", owner="ann")
    check_refused(encryptor, payload, owner="bob")
    check_refused(encryptor, payload, owner="")
    check_refused(encryptor, payload, kind="compaction")


def test_payload_of_unknown_secret_is_refused() -> None:
    check_refused(Encryptor([OTHER]), Encryptor([SECRET]).encrypt("text", kind="reasoning", owner="ann"))


def test_kits_without_secrets_generate_different_secrets() -> None:
    encryptor = Encryptor()
    payload = encryptor.encrypt("text", kind="reasoning", owner="ann")
    assert decrypted(encryptor, payload) == "text"
    check_refused(Encryptor(), payload)


def test_rotated_secret_decrypts_earlier_payloads() -> None:
    old = Encryptor([SECRET]).encrypt("old", kind="reasoning", owner="ann")
    both = Encryptor([OTHER, SECRET])
    new = both.encrypt("new", kind="reasoning", owner="ann")
    assert (decrypted(both, old), decrypted(both, new)) == ("old", "new")
    assert decrypted(Encryptor([OTHER]), new) == "new", "the first secret does not encrypt"
    check_refused(Encryptor([SECRET]), new)
    check_refused(Encryptor([OTHER]), old)


@given(data=st.data(), text=st.text(max_size=12))
def test_payload_with_changed_byte_is_refused(data: st.DataObject, text: str) -> None:
    encryptor = Encryptor([SECRET])
    mark, key, encoded = encryptor.encrypt(text, kind="reasoning", owner="ann").split(".")
    payload = bytearray(base64.urlsafe_b64decode(encoded))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] ^= data.draw(st.integers(1, 255))
    check_refused(encryptor, f"{mark}.{key}.{base64.urlsafe_b64encode(payload).decode()}")
    check_refused(encryptor, f"{mark}.{key}.{base64.urlsafe_b64encode(payload[:position]).decode()}")


@given(data=st.data(), text=st.text(max_size=12))
def test_payload_with_changed_character_never_decrypts_to_other_text(data: st.DataObject, text: str) -> None:
    encryptor = Encryptor([SECRET])
    payload = encryptor.encrypt(text, kind="reasoning", owner="ann")
    position = data.draw(st.integers(0, len(payload)))
    changed = data.draw(
        st.sampled_from(
            [
                payload[:position] + data.draw(st.characters(exclude_categories=())) + payload[position + 1 :],
                payload[:position] + payload[position + 1 :],
                payload[:position] + data.draw(st.text(min_size=1, max_size=3)) + payload[position:],
            ]
        )
    )
    try:
        result = decrypted(encryptor, changed)
    except errors.InvalidRequest:
        return
    # Base64 has several encodings of the same bytes, and payloads without the prefix belong to another server.
    assert result == text or (result is None and changed.partition(".")[0] != "rk1")


@pytest.mark.parametrize(
    "foreign", ["", "gAAAAABm…", "rk2.key.AAAA", "rk", "eyJhbGciOi.J9.x", "\ud83d", "RK1.x.y", " rk1.a.b"]
)
def test_foreign_payload_is_ignored(foreign: str) -> None:
    assert decrypted(Encryptor([SECRET]), foreign) is None


@pytest.mark.parametrize("rest", ["", ".", "..", "{key}", "{key}.", "{key}.A", "{key}.****", "{key}.\ud83d", "{key}.é"])
def test_malformed_payload_with_prefix_is_refused(rest: str) -> None:
    encryptor = Encryptor([SECRET])
    key = encryptor.encrypt("text", kind="reasoning", owner="ann").split(".")[1]
    for payload in (f"rk1.{rest.format(key=key)}", f"rk1.{rest.format(key=key)}AAAA", f"rk1.0000.{rest}"):
        with pytest.raises(errors.InvalidRequest) as caught:
            decrypted(encryptor, payload)
        assert caught.value.code == "invalid_encrypted_content"
    with pytest.raises(errors.InvalidRequest):
        decrypted(encryptor, "rk1")


@pytest.mark.parametrize("secrets", [["short"], [SECRET, "x" * 15], [""], SECRET, [b"x" * 32], [None], [7]])
def test_short_secret_is_refused(secrets: Any) -> None:
    for make in (Encryptor, lambda secrets: ResponsesKit(ScriptedBackend(), secrets=secrets)):
        with pytest.raises(errors.ConfigurationError, match="secret") as caught:
            make(secrets)
        assert SECRET not in str(caught.value)


# Through the kit.

anyio_both = pytest.mark.anyio

REASONING_SCRIPT = [outputs.Reasoning("The user "), outputs.Reasoning("greets."), "Hello."]
REQUEST: dict[str, Any] = {"input": "Hi", "include": ["reasoning.encrypted_content"], "store": False}


def kit_with(*scripts: Any, secrets: Any = (SECRET,), **settings: Any) -> tuple[ResponsesKit, ScriptedBackend]:
    backend = ScriptedBackend(*(scripts or (REASONING_SCRIPT,)))
    return ResponsesKit(backend, secrets=secrets, **settings), backend


def stateless_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return the reasoning item as a client without server-side storage sends it back."""
    return {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}


def follow_up(*items: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "Hi"}, *items, {"role": "user", "content": "And now?"}]}


@anyio_both
async def test_reasoning_item_has_encrypted_content_if_requested() -> None:
    kit, _ = kit_with()
    response = await kit.create(REQUEST)
    check_response(response)
    assert response["output"][0]["encrypted_content"].startswith("rk1.")
    assert "encrypted_content" not in (await kit.create({"input": "Hi"}))["output"][0]


@anyio_both
@pytest.mark.parametrize("stream_reasoning", [True, False])
async def test_stream_holds_encrypted_content_in_finished_item(stream_reasoning: bool) -> None:
    kit, _ = kit_with(stream_reasoning=stream_reasoning)
    async with kit.stream(REQUEST | {"stream": True}) as events:
        seen = [event async for event in events]
    response = check_stream(seen)
    added, done = [event["item"] for event in seen if event.get("output_index") == 0 and "item" in event]
    assert "encrypted_content" not in added
    assert done["encrypted_content"] == response["output"][0]["encrypted_content"]
    assert done["encrypted_content"].startswith("rk1.")


@anyio_both
@pytest.mark.parametrize("content", ["left out", [], None])
async def test_encrypted_reasoning_reaches_model_decrypted(content: Any) -> None:
    kit, backend = kit_with()
    first = await kit.create(REQUEST, owner="ann")
    item = stateless_item(first["output"][0]) | ({} if content == "left out" else {"content": content})
    second = await kit.create(
        follow_up(item, {"role": "assistant", "content": "Hello."}) | {"store": False}, owner="ann"
    )
    check_response(second)
    assert backend.turns[-1].items[1].text == "The user greets."
    assert backend.turns[-1].messages()[1]["reasoning_content"] == "The user greets."


@anyio_both
async def test_client_carried_reasoning_is_decrypted_in_another_process() -> None:
    payload = (await kit_with()[0].create(REQUEST, owner="ann"))["output"][0]
    kit, backend = kit_with(secrets=[OTHER, SECRET])
    await kit.create(follow_up(stateless_item(payload)), owner="ann")
    assert backend.turns[-1].items[1].text == "The user greets."


@anyio_both
async def test_stored_reasoning_stays_encrypted_and_is_decrypted_on_continuation() -> None:
    kit, backend = kit_with()
    payload = stateless_item((await kit.create(REQUEST, owner="ann"))["output"][0])
    second = await kit.create(follow_up(payload), owner="ann")
    stored_item = (await kit.input_items(second["id"], owner="ann", order="asc"))["data"][1]
    assert (stored_item["content"], stored_item["encrypted_content"]) == ([], payload["encrypted_content"])
    await kit.create({"input": "More.", "previous_response_id": second["id"]}, owner="ann")
    assert backend.turns[-1].items[1].text == "The user greets."


@anyio_both
async def test_plain_reasoning_content_is_used_unchanged() -> None:
    kit, backend = kit_with()
    item = (await kit.create(REQUEST, owner="ann"))["output"][0]
    item["content"] = [{"type": "reasoning_text", "text": "Mine."}]
    await kit.create(follow_up(item), owner="ann")
    assert backend.turns[-1].items[1].text == "Mine."


@anyio_both
@pytest.mark.parametrize("foreign", ["gAAAAABm", "rk2.x.y", "…"])
async def test_foreign_encrypted_reasoning_is_accepted_and_kept(foreign: str) -> None:
    kit, backend = kit_with()
    item = {"type": "reasoning", "summary": [], "encrypted_content": foreign}
    response = await kit.create(follow_up(item))
    stored_item = (await kit.input_items(response["id"], order="asc"))["data"][1]
    assert stored_item["encrypted_content"] == foreign
    assert backend.turns[-1].items[1].text == ""
    assert [message["role"] for message in backend.turns[-1].messages()] == ["user", "user"]


@anyio_both
@pytest.mark.parametrize("fault", ["changed", "another's", "another secret's"])
async def test_tampered_reasoning_is_refused_with_param(fault: str) -> None:
    kit, backend = kit_with()
    item = stateless_item((await kit.create(REQUEST, owner="ann"))["output"][0])
    owner = "bob" if fault == "another's" else "ann"
    if fault == "changed":
        payload = item["encrypted_content"]
        position = len(payload) // 2
        item["encrypted_content"] = (
            payload[:position] + ("A" if payload[position] != "A" else "B") + payload[position + 1 :]
        )
    elif fault == "another secret's":
        kit, backend = kit_with(secrets=[OTHER])
    asked = len(backend.turns)
    with pytest.raises(errors.InvalidRequest) as caught:
        await kit.create(follow_up({"role": "assistant", "content": "x"}, item), owner=owner)
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "invalid_encrypted_content",
        "input[2].encrypted_content",
    )
    assert len(backend.turns) == asked


@anyio_both
async def test_conversation_with_lost_secret_is_refused_with_param() -> None:
    kit, _ = kit_with()
    payload = stateless_item((await kit.create(REQUEST, owner="ann"))["output"][0])
    second = await kit.create(follow_up(payload), owner="ann")
    later = ResponsesKit(ScriptedBackend(REASONING_SCRIPT), store=kit.store, secrets=[OTHER])
    with pytest.raises(errors.InvalidRequest) as caught:
        await later.create({"input": "More.", "previous_response_id": second["id"]}, owner="ann")
    assert (caught.value.code, caught.value.param) == ("invalid_encrypted_content", "previous_response_id")
