"""Tests of the setting `RESPONSES_KIT`: valid and invalid values, and the kit that is created of them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from responses_kit import Backend, ResponsesKit, Turn
from responses_kit._concurrency import loop_thread
from responses_kit.errors import InvalidRequest
from responses_kit.outputs import Reasoning
from responses_kit.runners.base import LocalRunner
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend
from responses_kit.tools import HostedTool

from .databases import configure

configure()

from django.core.exceptions import ImproperlyConfigured  # noqa: E402  # Django's settings come first
from django.test import override_settings  # noqa: E402

from responses_kit_django import auth, conf  # noqa: E402
from responses_kit_django.conf import Conf, get_kit, get_kit_async  # noqa: E402
from responses_kit_django.scope import DatabaseScope  # noqa: E402
from responses_kit_django.store import OrmStore  # noqa: E402

BOUND = 20.0

HERE = __name__


class Parrot(Backend):
    """A backend that records its instances and the closed ones."""

    models = ("parrot",)
    made: ClassVar[list[Parrot]] = []
    closed: ClassVar[list[Parrot]] = []

    def __init__(self) -> None:
        self.made.append(self)

    async def generate(self, turn: Turn) -> Any:
        yield turn.text

    def close(self) -> None:
        self.closed.append(self)


class Grumpy(Parrot):
    def __init__(self) -> None:
        raise RuntimeError("no parrot today")


class Wanting(Parrot):
    def __init__(self, seed: int) -> None:
        super().__init__()


class Store(MemoryStore):
    """A custom store."""


class Clock(HostedTool):
    """A hosted tool."""

    def __init__(self) -> None:
        super().__init__("acme:clock")

    async def call(self, arguments: Any, turn: Turn) -> str:
        return "noon"


parrot = Parrot()
store = Store()
clock = Clock()
runner = LocalRunner()


def a_parrot() -> Parrot:
    return parrot


def a_store(**options: Any) -> Store:
    return Store(**options)


def a_clock() -> Clock:
    return clock


def a_runner() -> LocalRunner:
    return runner


def anybody(request: Any) -> str:
    return "anybody"


@pytest.fixture(autouse=True)
def _no_parrots_of_others() -> None:
    Parrot.made.clear()
    Parrot.closed.clear()


# Valid settings.


def test_defaults_apply_without_settings() -> None:
    settings = Conf({})
    assert {name: settings[name] for name in conf.DEFAULTS} == conf.DEFAULTS
    assert isinstance(settings.build_store(), OrmStore)
    assert settings.get_runner() is None
    assert settings.import_setting("AUTH") == [auth.session]
    assert settings.import_setting("OWNER") is auth.user
    made = Conf({"BACKEND": a_parrot}).build()
    assert made.backend is parrot
    assert isinstance(made.store, OrmStore)


@pytest.mark.parametrize("settings", [f"{HERE}.parrot", f"{HERE}.a_parrot", parrot, a_parrot])
def test_backend_may_be_object_or_factory(settings: Any) -> None:
    assert Conf({"BACKEND": settings}).build().backend is parrot


@pytest.mark.parametrize("settings", [f"{HERE}.Parrot", Parrot])
def test_backend_class_is_instantiated(settings: Any) -> None:
    assert Conf({"BACKEND": settings}).build().backend is Parrot.made[0]


@pytest.mark.parametrize("settings", [f"{HERE}.store", store])
def test_store_may_be_object(settings: Any) -> None:
    assert Conf({"STORE": settings}).build_store() is store


@pytest.mark.parametrize("settings", [f"{HERE}.Store", f"{HERE}.a_store", Store, a_store])
def test_store_factory_receives_options(settings: Any) -> None:
    made: Any = Conf({"STORE": settings, "STORE_OPTIONS": {"ttl": 7}}).build_store(log_ttl=3)
    assert isinstance(made, Store)
    assert made._ttl == 7
    assert made._log_ttl == 3


def test_store_url_receives_options() -> None:
    made: Any = Conf({"STORE": "memory:", "STORE_OPTIONS": {"ttl": 7}}).build_store()
    assert type(made) is MemoryStore
    assert made._ttl == 7


def test_store_may_use_other_database_alias() -> None:
    here: Any = Conf({"STORE": "orm:", "STORE_OPTIONS": {"max_records": 5}}).build_store()
    other: Any = Conf({"STORE": "orm:other"}).build_store()
    assert (here._using, here._max_records) == ("default", 5)
    assert other._using == "other"


@pytest.mark.parametrize("settings", [f"{HERE}.clock", f"{HERE}.a_clock", f"{HERE}.Clock", clock, Clock])
def test_tools_may_be_objects_classes_or_factories(settings: Any) -> None:
    made = Conf({"BACKEND": a_parrot, "STORE": "memory:", "TOOLS": (settings,)}).build()
    assert list(made.service.toolsets) == ["acme:clock"]


@pytest.mark.parametrize("settings", [f"{HERE}.runner", f"{HERE}.a_runner", runner, a_runner])
def test_runner_may_be_object_or_factory(settings: Any) -> None:
    assert Conf({"RUNNER": settings}).get_runner() is runner


def test_other_settings_are_passed_to_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(conf, "_ProjectKit", lambda backend, **more: given.update(more))
    names = set(inspect.signature(ResponsesKit).parameters) - {"on_response_end", "scope", "clock"}
    ours = {"backend", "store", "owner", "tools", "runner", "secrets", "limits", "timeouts"}
    others: dict[str, object] = dict.fromkeys(names - ours, 7) | {"allowed_origins": ["https://app.example"]}
    settings = {"BACKEND": a_parrot, **{name.upper(): value for name, value in others.items()}}
    Conf(settings).build()
    assert given.keys() == names - {"backend"} | {"on_response_end", "scope"}
    assert {name: given[name] for name in others} == others
    assert isinstance(given["scope"], DatabaseScope)


# Invalid settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], r"RESPONSES_KIT must be a dict"),
        ("path.to.Backend", r"RESPONSES_KIT must be a dict"),
        ({"BACKENDS": "x.y"}, r"has no setting 'BACKENDS': did you mean 'BACKEND'\?"),
        ({"store": "orm:"}, r"has no setting 'store': did you mean 'STORE'\?"),
        ({"Q": 1}, r"has no setting 'Q': the settings are ALLOWED_ORIGINS, AUTH, BACKEND, .*TOOLS"),
        ({7: 1}, r"has no setting 7"),
        ({"ENDED": anybody}, r"has no setting 'ENDED'"),
        ({"SURROUNDINGS": None}, r"has no setting 'SURROUNDINGS'"),
        ({"AUTH": "responses_kit_django.auth.session"}, r"RESPONSES_KIT\['AUTH'\] must be a list"),
        ({"AUTH": None}, r"RESPONSES_KIT\['AUTH'\] must be a list"),
        ({"TOOLS": Clock}, r"RESPONSES_KIT\['TOOLS'\] must be a list"),
        ({"SECRETS": "sesame"}, r"RESPONSES_KIT\['SECRETS'\] must be a list"),
        ({"STORE_OPTIONS": [1]}, r"RESPONSES_KIT\['STORE_OPTIONS'\] must be a dict"),
    ],
)
def test_unknown_setting_is_reported_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=message):
        Conf(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"BACKEND": "nowhere.Parrot"}, r"\['BACKEND'\]: No module named 'nowhere'"),
        ({"BACKEND": f"{HERE}.Macaw"}, r"\['BACKEND'\]: .* does not define a .Macaw."),
        ({"BACKEND": "parrot"}, r"\['BACKEND'\]: parrot doesn't look like a module path"),
        ({"BACKEND": Wanting}, r"\['BACKEND'\]: .*missing 1 required positional argument: 'seed'"),
        ({"BACKEND": 5}, r"RESPONSES_KIT: 'backend' must be an instance of a subclass of Backend, not of int"),
        ({"STORE": None}, r"\['STORE'\]: a store URL must start with"),
        ({"STORE": "oracle://somewhere"}, r"\['STORE'\]: a store URL must start with"),
        ({"STORE": "responses"}, r"\['STORE'\]: responses doesn't look like a module path"),
        ({"STORE": "orm:nowhere"}, r"\['STORE'\]: the database 'nowhere' cannot be used"),
        ({"STORE_OPTIONS": {"tll": 5}}, r"\['STORE'\]: .*unexpected keyword argument 'tll'"),
        ({"STORE": store, "STORE_OPTIONS": {"ttl": 5}}, r"\['STORE'\]: an object takes no options"),
        ({"STORE": clock}, r"RESPONSES_KIT: 'store' must have the methods of ResponseStore; Clock lacks"),
        ({"AUTH": ["nowhere.hook"]}, r"\['AUTH'\]: No module named 'nowhere'"),
        ({"AUTH": [None]}, r"\['AUTH'\] must be a function of the request, not NoneType"),
        ({"PERMISSION": f"{HERE}.Clock"}, r"\['PERMISSION'\] must be a function of the request, not Clock"),
        ({"PERMISSION": "nowhere.hook"}, r"\['PERMISSION'\]: No module named 'nowhere'"),
        ({"OWNER": "nowhere.hook"}, r"\['OWNER'\]: No module named 'nowhere'"),
        ({"OWNER": 5}, r"\['OWNER'\] must be a function of the request, not int"),
        ({"OWNER": Store}, r"\['OWNER'\] must be a function of the request, not Store"),
        ({"TOOLS": ["nowhere.tool"]}, r"\['TOOLS'\]: No module named 'nowhere'"),
        ({"TOOLS": [5]}, r"RESPONSES_KIT: 'tools' must hold HostedTool instances"),
        ({"TOOLS": [clock, Clock]}, r"RESPONSES_KIT: two tools have the type acme:clock"),
        ({"RUNNER": {}}, r"\['RUNNER'\]: unhashable type"),
        ({"RUNNER": "nowhere.runner"}, r"\['RUNNER'\]: No module named 'nowhere'"),
        ({"RUNNER": store}, r"RESPONSES_KIT: 'runner' must have the methods of Runner, unlike Store"),
        ({"LIMITS": {"max_body_bytes": "1MB"}}, r"\['LIMITS'\]: 'max_body_bytes' must be a whole number"),
        ({"LIMITS": 5}, r"\['LIMITS'\]: must be a dict or an instance of Limits"),
        ({"TIMEOUTS": {"lese": 5}}, r"\['TIMEOUTS'\]: .*unexpected keyword argument 'lese'"),
        (
            {"ALLOWED_ORIGINS": "https://app.example"},
            r"\['ALLOWED_ORIGINS'\]: 'allowed_origins' must be a list of origins",
        ),
        ({"TIMEOUTS": {"lease": 0}}, r"\['TIMEOUTS'\]: 'lease' must be a number of seconds"),
        ({"SECRETS": ["short"]}, r"RESPONSES_KIT: .*secret"),
    ],
)
def test_invalid_setting_is_reported_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=message) as error:
        Conf({"BACKEND": a_parrot, **settings}).build()
    assert error.value.__cause__ is not None or "function of the request" in message


@pytest.mark.parametrize("wrong", [{"STORE": "nowhere:"}, {"OWNER": 5}, {"TOOLS": ["x.y"]}, {"RUNNER": "x.y"}])
def test_backend_is_not_made_if_another_setting_is_invalid(wrong: dict[str, Any]) -> None:
    with pytest.raises(ImproperlyConfigured):
        Conf({"BACKEND": Parrot, **wrong}).build()
    assert not Parrot.made


# The kit.


def test_kit_is_made_once_by_concurrent_requests() -> None:
    together = threading.Barrier(8, timeout=BOUND)

    def ask() -> ResponsesKit:
        together.wait()
        return get_kit()

    with override_settings(RESPONSES_KIT={"BACKEND": Parrot, "STORE": "memory:"}), ThreadPoolExecutor(8) as pool:
        kits = {id(one.result(BOUND)) for one in [pool.submit(ask) for _ in range(8)]}
        assert len(kits) == len(Parrot.made) == 1
        assert id(asyncio.run(get_kit_async())) in kits


def test_kit_is_made_off_event_loop() -> None:
    loops: list[bool] = []

    def backend() -> Parrot:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            loops.append(False)
        else:
            loops.append(True)
        return Parrot()

    with override_settings(RESPONSES_KIT={"BACKEND": backend, "STORE": "memory:"}):
        asyncio.run(get_kit_async())
    assert loops == [False]


def test_backend_failure_is_raised_and_retried_by_next_request() -> None:
    moods = [Grumpy, Parrot]
    with override_settings(RESPONSES_KIT={"BACKEND": lambda: moods.pop(0)(), "STORE": "memory:"}):
        with pytest.raises(RuntimeError, match="no parrot today"):
            get_kit()
        assert isinstance(get_kit().backend, Parrot)


@pytest.mark.parametrize("setting", ["RESPONSES_KIT", "SECRET_KEY", "SECRET_KEY_FALLBACKS"])
def test_overridden_setting_replaces_kit(setting: str) -> None:
    ours = {"BACKEND": Parrot, "STORE": "memory:"}
    others: dict[str, Any] = {"RESPONSES_KIT": ours, "SECRET_KEY": "x" * 50, "SECRET_KEY_FALLBACKS": ["y" * 50]}
    with override_settings(RESPONSES_KIT=ours):
        first = get_kit()
        loop_thread.start_kit(first)
        with override_settings(**{setting: others[setting]}):
            assert first.lifecycle.is_closing
            assert Parrot.closed == [first.backend]
            second = get_kit()
            assert second is not first
        assert get_kit() not in (first, second)


def test_unrelated_setting_keeps_kit() -> None:
    with override_settings(RESPONSES_KIT={"BACKEND": Parrot, "STORE": "memory:"}):
        first = get_kit()
        with override_settings(DEBUG=True, USE_TZ=False):
            assert get_kit() is first


def test_new_event_loop_gets_new_kit() -> None:
    from responses_kit.adapters.asgi import start_kit

    async def ask() -> str:
        found = await get_kit_async()
        await start_kit(found)
        response = await found.create({"input": "Hello?"})
        text: str = response["output"][0]["content"][0]["text"]
        return text

    with override_settings(RESPONSES_KIT={"BACKEND": Parrot, "STORE": "memory:"}):
        assert [asyncio.run(ask()), asyncio.run(ask())] == ["Hello?", "Hello?"]
        assert Parrot.closed == Parrot.made


def test_closing_kit_closes_store() -> None:
    closed: list[bool] = []

    class Closing(MemoryStore):
        async def aclose(self) -> None:
            assert Parrot.closed, "the backend's last responses are to be kept"
            closed.append(True)

    with override_settings(RESPONSES_KIT={"BACKEND": Parrot, "STORE": Closing}):
        loop_thread.start_kit(get_kit())
        assert not closed
    assert closed == [True]


# Secrets.


def thinking() -> ScriptedBackend:
    return ScriptedBackend([Reasoning("Mate in two."), "Checkmate."])


def sealed() -> dict[str, Any]:
    """Return an encrypted reasoning item, as clients carry it."""
    request = {"input": "Play.", "include": ["reasoning.encrypted_content"], "store": False}
    response = loop_thread.call(lambda: get_kit().create(request, owner="ann"))
    (item,) = (item for item in response["output"] if item["type"] == "reasoning")
    return {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}


def opened(item: dict[str, Any]) -> str:
    """Return the reasoning text that reaches the backend."""
    found = get_kit()
    loop_thread.call(lambda: found.create({"input": [item, {"role": "user", "content": "Go on."}]}, owner="ann"))
    content: Any = found.backend.turns[-1].items[0].content  # type: ignore[attr-defined]  # a scripted one has it
    return str(content[0].text)


OURS: dict[str, Any] = {"BACKEND": thinking, "STORE": "memory:"}


def test_payload_of_rotated_secret_key_is_decrypted() -> None:
    with override_settings(RESPONSES_KIT=OURS, SECRET_KEY="the old key, which was long enough"):
        item = sealed()
        assert opened(item) == "Mate in two."
    rotated = {"SECRET_KEY": "the new key, which is longer still"}
    with override_settings(RESPONSES_KIT=OURS, SECRET_KEY_FALLBACKS=["the old key, which was long enough"], **rotated):
        assert opened(item) == "Mate in two."
        newer = sealed()
    with override_settings(RESPONSES_KIT=OURS, **rotated):
        assert opened(newer) == "Mate in two."
        with pytest.raises(InvalidRequest, match="cannot be decrypted") as refusal:
            opened(item)
    assert refusal.value.code == "invalid_encrypted_content"


def test_secrets_setting_replaces_secret_key() -> None:
    secrets = ["a secret of our own, of 32 bytes", "and one that was there before it"]
    with override_settings(RESPONSES_KIT={**OURS, "SECRETS": secrets[1:]}):
        item = sealed()
    with override_settings(RESPONSES_KIT={**OURS, "SECRETS": secrets}, SECRET_KEY="x" * 50):
        assert opened(item) == "Mate in two."


def test_secret_key_itself_is_not_used() -> None:
    with override_settings(SECRET_KEY="k" * 50, SECRET_KEY_FALLBACKS=["z" * 50]):
        secrets = Conf({}).get_secrets()
    assert len({*secrets}) == 2
    assert not any(key in secret for secret in secrets for key in "kz")  # derived secrets are hexadecimal
