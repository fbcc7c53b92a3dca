"""The setting `RESPONSES_KIT`, and the kit that is made of it."""

from __future__ import annotations

import difflib
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import anyio.to_thread
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.crypto import salted_hmac
from django.utils.module_loading import import_string

from responses_kit._concurrency import loop_thread
from responses_kit.backend import Backend
from responses_kit.engine.run import Run
from responses_kit.errors import ConfigurationError
from responses_kit.kit import ResponsesKit
from responses_kit.kit.settings import Limits, Timeouts, normalize_origins
from responses_kit.runners.base import Runner, Work
from responses_kit.stores.opening import open_store
from responses_kit.stores.protocol import ResponseStore

from .auth import Gate
from .scope import DatabaseScope
from .signals import announce

__all__ = ["DEFAULTS", "Conf", "elsewhere", "generate", "kit", "ready"]

DEFAULTS: Final[Mapping[str, Any]] = {
    "BACKEND": "responses_kit.backends.local.LocalBackend",
    "STORE": "orm:",
    "STORE_OPTIONS": {},
    "AUTH": ["responses_kit_django.auth.session"],
    "PERMISSION": None,
    "OWNER": "responses_kit_django.auth.user",
    "TOOLS": [],
    "RUNNER": None,
    "SECRETS": None,
    "LIMITS": Limits(),
    "TIMEOUTS": Timeouts(),
}
"""What is looked at here. All other settings of `ResponsesKit` may be given in upper case, and go to it as they are."""

_PASSED_ON: Final = {name.upper() for name in inspect.signature(ResponsesKit).parameters} - {
    *DEFAULTS, "ON_RESPONSE_END", "SCOPE", "CLOCK"
}  # fmt: skip


class Conf:
    """The settings as they are at one time; each method raises `ImproperlyConfigured`, which names the setting.

    Where the path, or the object, of a backend, store, tool or runner is a class or a function, that is called to
    have one.

    Args:
        given: What the project says; by default, what its settings do.
    """

    def __init__(self, given: Any = None) -> None:
        given = getattr(settings, "RESPONSES_KIT", {}) if given is None else given
        if not isinstance(given, Mapping):
            raise ImproperlyConfigured("RESPONSES_KIT is a dict, such as {'BACKEND': 'path.to.Backend'}")
        known = sorted({*DEFAULTS, *_PASSED_ON})
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(str(name).upper(), known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
                raise ImproperlyConfigured(f"RESPONSES_KIT has no setting {name!r}: {hint}")
        self._given = {**DEFAULTS, **given}
        for name in ("AUTH", "TOOLS", "SECRETS"):
            if not isinstance(self._given[name], list | tuple | type(DEFAULTS[name])):
                raise ImproperlyConfigured(f"RESPONSES_KIT[{name!r}] is a list")
        if not isinstance(self._given["STORE_OPTIONS"], Mapping):
            raise ImproperlyConfigured("RESPONSES_KIT['STORE_OPTIONS'] is a dict, such as {'ttl': 86400}")
        self._given["LIMITS"] = _instance("LIMITS", Limits, self._given["LIMITS"])
        self._given["TIMEOUTS"] = _instance("TIMEOUTS", Timeouts, self._given["TIMEOUTS"])
        with _naming("ALLOWED_ORIGINS"):
            normalize_origins(given.get("ALLOWED_ORIGINS", ()))

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def imported(self, name: str) -> Any:
        """A setting's value, or its values; what a string names is imported."""
        value = self._given[name]
        with _naming(name):
            if isinstance(value, list | tuple):
                return [import_string(one) if isinstance(one, str) else one for one in value]
            return import_string(value) if isinstance(value, str) else value

    def gate(self) -> Gate:
        """The owner hook."""
        auth, permission, owner = map(self.imported, ("AUTH", "PERMISSION", "OWNER"))
        with _naming("AUTH"):
            return Gate(auth=auth, permission=permission, owner=owner)

    def backend(self) -> Backend:
        """The backend."""
        backend: Backend = _made("BACKEND", self.imported("BACKEND"))
        return backend

    def store(self, **more: Any) -> ResponseStore:
        """The store, "orm:" for the project's own database, "orm:alias" for another of its; with more options."""
        address, options = self._given["STORE"], {**self._given["STORE_OPTIONS"], **more}
        store: ResponseStore
        with _naming("STORE"):
            if isinstance(address, str) and address.startswith("orm:"):
                from .store.store import OrmStore  # which needs all apps to be there

                store = OrmStore(address.removeprefix("orm:") or None, **options)
            elif address is None or (isinstance(address, str) and ":" in address):
                store = open_store(address or "", **options)
            else:
                store = _made("STORE", self.imported("STORE"), **options)
        return store

    def runner(self) -> Runner | None:
        """What works on background responses, where that is not this process by itself; made once in a process."""
        with _naming("RUNNER"):
            runner: Runner | None = _runner(self.imported("RUNNER"))
        return runner

    def secrets(self) -> list[str]:
        """By default what Django itself seals with, old keys included."""
        if self._given["SECRETS"] is not None:
            return list(self._given["SECRETS"])
        keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
        return [salted_hmac("responses_kit_django", "secrets", key, algorithm="sha256").hexdigest() for key in keys]

    def build(self) -> ResponsesKit:
        """The kit. What may take long, the backend, is made last."""
        runner: Any = self.runner()
        if getattr(runner, "is_out_of_process", False):
            runner = elsewhere(runner)
        made: dict[str, Any] = {
            "owner": self.gate(),
            "store": self.store(),
            "runner": runner,
            "tools": [_made("TOOLS", tool) for tool in self.imported("TOOLS")],
            "secrets": self.secrets(),
            "limits": self["LIMITS"],
            "timeouts": self["TIMEOUTS"],
            **{name.lower(): value for name, value in self._given.items() if name in _PASSED_ON},
        }
        backend = self.backend()
        with _naming():
            return _ProjectKit(backend, on_response_end=announce, scope=DatabaseScope(), **made)


@contextmanager
def _naming(*names: str) -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, ImportError, TypeError) as error:
        raise ImproperlyConfigured(f"RESPONSES_KIT{''.join(f'[{name!r}]' for name in names)}: {error}") from error


def _instance(name: str, kind: type[Any], value: Any) -> Any:
    with _naming(name):
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"must be a dict or an instance of {kind.__name__}")
        return kind(**value)


def _made(name: str, found: Any, **options: Any) -> Any:
    with _naming(name):
        if isinstance(found, type) or inspect.isroutine(found):
            return found(**options)
        if options:
            raise TypeError("it was made elsewhere, with options of its own; give it those there")
        return found


@functools.cache
def _runner(found: Any) -> Any:
    return _made("RUNNER", found)  # once for its queue, which knows tasks by name


class _ProjectKit(ResponsesKit):
    """The kit of the settings, with which its store is closed. Where it has ended, the next request finds a new one."""

    async def aclose(self, grace: float = 0.0) -> None:
        global _kit
        try:
            await super().aclose(grace)
        finally:
            if _kit is self:  # an event loop has ended, but the process may go on with others, as it does in tests
                _kit = None
            if hasattr(self.store, "aclose"):
                await self.store.aclose()


_lock = threading.Lock()
_kit: ResponsesKit | None = None


def kit() -> ResponsesKit:
    """The project's kit, made when it is first asked for; that may take as long as a model takes to load.

    Raises:
        ImproperlyConfigured: A setting is wrong; the message names it.
    """
    global _kit
    found = _kit
    if found is None:
        with _lock:
            found = _kit = _kit or Conf().build()
    return found


async def ready() -> ResponsesKit:
    """The same, without keeping the event loop waiting."""
    return _kit or await sync_to_async(kit, thread_sensitive=False)()


async def generate(owner: str, response_id: str) -> None:
    """As `ResponsesKit.work` of the project's kit, which lives on this process's event loop from then on."""
    found = await anyio.to_thread.run_sync(_living)
    await found.service.run_queued(owner, response_id)


def _living() -> ResponsesKit:
    found = kit()
    loop_thread.start_kit(found)
    return found


def elsewhere(runner: Any) -> Any:
    """A runner whose workers import this module, as the kit gets it."""
    return runner if hasattr(runner, "as_task") else _Elsewhere(runner)


class _Elsewhere:
    """Tells a runner once what its workers are to call, whether there is a kit yet or not."""

    is_out_of_process = True

    def __init__(self, runner: Runner) -> None:
        self.queue_timeout = runner.queue_timeout
        self._runner = runner

    def bind(self, work: Work) -> None:
        """As `Runner.bind`."""
        if self._runner not in _bound:
            _bound.append(self._runner)
            self._runner.bind(generate)

    async def submit(self, run: Run) -> None:
        """As `Runner.submit`."""
        await self._runner.submit(run)


_bound: list[Runner] = []


def _reset(*, setting: str, **_: Any) -> None:
    """What is made of settings is made anew when tests change them."""
    global _kit
    if setting in ("RESPONSES_KIT", "SECRET_KEY", "SECRET_KEY_FALLBACKS"):
        with _lock:
            old, _kit = _kit, None
        if old is not None:
            loop_thread.stop_kit(old)


setting_changed.connect(_reset)
