"""The setting `RESPONSES_KIT`, and the project's kit."""

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

from .auth import OwnerHook
from .scope import DatabaseScope
from .signals import send_response_signal

__all__ = ["DEFAULTS", "Conf", "bind_runner", "get_kit", "get_kit_async", "run_queued"]

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
"""The settings that have defaults in Django."""

_KIT_SETTINGS: Final = {name.upper() for name in inspect.signature(ResponsesKit).parameters} - {
    *DEFAULTS, "ON_RESPONSE_END", "SCOPE", "CLOCK"
}  # fmt: skip
"""Other parameters of `ResponsesKit`, in upper case. They are passed on unchanged."""


class Conf:
    """The settings as they were when the instance was created.

    A backend, store, tool or runner may be given as an object, a class or function that is called to create it, or a
    dotted path of one of these.

    Args:
        values: The settings by name; by default the project's `RESPONSES_KIT`.

    Raises:
        ImproperlyConfigured: A setting is invalid; the message names it. The methods that build objects raise it, too.
    """

    def __init__(self, values: Any = None) -> None:
        values = getattr(settings, "RESPONSES_KIT", {}) if values is None else values
        if not isinstance(values, Mapping):
            raise ImproperlyConfigured("RESPONSES_KIT must be a dict, such as {'BACKEND': 'path.to.Backend'}")
        known = sorted({*DEFAULTS, *_KIT_SETTINGS})
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name).upper(), known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(known)}"
                raise ImproperlyConfigured(f"RESPONSES_KIT has no setting {name!r}: {hint}")
        self._values = {**DEFAULTS, **values}
        for name in ("AUTH", "TOOLS", "SECRETS"):
            if not isinstance(self._values[name], list | tuple | type(DEFAULTS[name])):
                raise ImproperlyConfigured(f"RESPONSES_KIT[{name!r}] must be a list")
        if not isinstance(self._values["STORE_OPTIONS"], Mapping):
            raise ImproperlyConfigured("RESPONSES_KIT['STORE_OPTIONS'] must be a dict, such as {'ttl': 86400}")
        self._values["LIMITS"] = _coerce("LIMITS", Limits, self._values["LIMITS"])
        self._values["TIMEOUTS"] = _coerce("TIMEOUTS", Timeouts, self._values["TIMEOUTS"])
        with _errors_for("ALLOWED_ORIGINS"):
            normalize_origins(values.get("ALLOWED_ORIGINS", ()))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def import_setting(self, name: str) -> Any:
        """Return the value of a setting, with dotted paths in it replaced by the objects they name."""
        value = self._values[name]
        with _errors_for(name):
            if isinstance(value, list | tuple):
                return [import_string(one) if isinstance(one, str) else one for one in value]
            return import_string(value) if isinstance(value, str) else value

    def build_owner_hook(self) -> OwnerHook:
        """Return the kit's `owner` hook, made of `AUTH`, `PERMISSION` and `OWNER`."""
        auth, permission, owner = map(self.import_setting, ("AUTH", "PERMISSION", "OWNER"))
        with _errors_for("AUTH"):
            return OwnerHook(auth=auth, permission=permission, owner=owner)

    def build_backend(self) -> Backend:
        """Return the backend. Creating it may take as long as a model takes to load."""
        backend: Backend = _instantiate("BACKEND", self.import_setting("BACKEND"))
        return backend

    def build_store(self, **overrides: Any) -> ResponseStore:
        """Return the store object in `STORE`, or a new store from its path or URL.

        Args:
            overrides: Options that replace those of `STORE_OPTIONS`.
        """
        address, options = self._values["STORE"], {**self._values["STORE_OPTIONS"], **overrides}
        store: ResponseStore
        with _errors_for("STORE"):
            if isinstance(address, str) and address.startswith("orm:"):
                from .store.store import (
                    OrmStore,
                )  # needs models, which cannot be imported before the app registry is ready

                store = OrmStore(address.removeprefix("orm:") or None, **options)
            elif address is None or (isinstance(address, str) and ":" in address):
                store = open_store(address or "", **options)
            else:
                store = _instantiate("STORE", self.import_setting("STORE"), **options)
        return store

    def get_runner(self) -> Runner | None:
        """Return this process's only runner, or None if `RUNNER` is not set."""
        with _errors_for("RUNNER"):
            runner: Runner | None = _build_runner(self.import_setting("RUNNER"))
        return runner

    def get_secrets(self) -> list[str]:
        """Return `SECRETS`, or secrets derived from `SECRET_KEY` and `SECRET_KEY_FALLBACKS`."""
        if self._values["SECRETS"] is not None:
            return list(self._values["SECRETS"])
        keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
        return [salted_hmac("responses_kit_django", "secrets", key, algorithm="sha256").hexdigest() for key in keys]

    def build(self) -> ResponsesKit:
        """Return a new kit with these settings."""
        runner: Any = self.get_runner()
        if getattr(runner, "is_out_of_process", False) and not hasattr(runner, "as_task"):
            runner = _WorkerRunner(runner)
        arguments: dict[str, Any] = {
            "owner": self.build_owner_hook(),
            "store": self.build_store(),
            "runner": runner,
            "tools": [_instantiate("TOOLS", tool) for tool in self.import_setting("TOOLS")],
            "secrets": self.get_secrets(),
            "limits": self["LIMITS"],
            "timeouts": self["TIMEOUTS"],
            **{name.lower(): value for name, value in self._values.items() if name in _KIT_SETTINGS},
        }
        backend = self.build_backend()  # last, because it may be slow and other errors should come first
        with _errors_for():
            return _ProjectKit(backend, on_response_end=send_response_signal, scope=DatabaseScope(), **arguments)


@contextmanager
def _errors_for(*names: str) -> Iterator[None]:
    """Convert errors to `ImproperlyConfigured`, with the setting's name in the message."""
    try:
        yield
    except (ConfigurationError, ImportError, TypeError) as error:
        raise ImproperlyConfigured(f"RESPONSES_KIT{''.join(f'[{name!r}]' for name in names)}: {error}") from error


def _coerce(name: str, kind: type[Any], value: Any) -> Any:
    with _errors_for(name):
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"must be a dict or an instance of {kind.__name__}")
        return kind(**value)


def _instantiate(name: str, value: Any, **options: Any) -> Any:
    """Return the object that a setting's value creates, or the value itself if it is neither a class nor a function."""
    with _errors_for(name):
        if isinstance(value, type) or inspect.isroutine(value):
            return value(**options)
        if options:
            raise TypeError("an object takes no options; pass them where it is created")
        return value


@functools.cache
def _build_runner(value: Any) -> Any:
    return _instantiate("RUNNER", value)  # cached, because queues register tasks by name, once in a process


class _ProjectKit(ResponsesKit):
    """The project's kit. Closing it also closes its store; the next request then builds a new kit."""

    async def aclose(self, grace: float = 0.0) -> None:
        global _kit
        try:
            await super().aclose(grace)
        finally:
            if _kit is self:  # the process may run another event loop, as tests do
                _kit = None
            if hasattr(self.store, "aclose"):
                await self.store.aclose()


_kit_lock = threading.Lock()
_kit: ResponsesKit | None = None


def get_kit() -> ResponsesKit:
    """Return the project's kit. The first call creates it, which may take as long as a model takes to load.

    Raises:
        ImproperlyConfigured: A setting is wrong; the message names it.
    """
    global _kit
    kit = _kit
    if kit is None:
        with _kit_lock:
            kit = _kit = _kit or Conf().build()
    return kit


async def get_kit_async() -> ResponsesKit:
    """Return the project's kit without blocking the event loop; see `get_kit`."""
    return _kit or await sync_to_async(get_kit, thread_sensitive=False)()


async def run_queued(owner: str, response_id: str) -> None:
    """Run a queued response with the project's kit, which is started on this process's background event loop."""
    kit = await anyio.to_thread.run_sync(_start_kit)
    await kit.service.run_queued(owner, response_id)


def _start_kit() -> ResponsesKit:
    kit = get_kit()
    loop_thread.start_kit(kit)
    return kit


def bind_runner(runner: Runner) -> None:
    """Bind an out-of-process runner to `run_queued`, once in a process. Workers do so before they have a kit."""
    if runner not in _bound_runners:
        _bound_runners.append(runner)
        runner.bind(run_queued)


_bound_runners: list[Runner] = []


class _WorkerRunner:
    """An out-of-process runner that is bound to `run_queued`, and not to the kit that it is given to."""

    is_out_of_process = True

    def __init__(self, runner: Runner) -> None:
        self.queue_timeout = runner.queue_timeout
        self._runner = runner

    def bind(self, work: Work) -> None:
        """Bind the runner; see `Runner.bind`."""
        bind_runner(self._runner)

    async def submit(self, run: Run) -> None:
        """Submit a run; see `Runner.submit`."""
        await self._runner.submit(run)


def _reset_kit(*, setting: str, **_: Any) -> None:
    """Discard the kit when a test changes a setting that it depends on."""
    global _kit
    if setting in ("RESPONSES_KIT", "SECRET_KEY", "SECRET_KEY_FALLBACKS"):
        with _kit_lock:
            old, _kit = _kit, None
        if old is not None:
            loop_thread.stop_kit(old)


setting_changed.connect(_reset_kit)
