"""The public names, and the imports that they cause."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import responses_kit
from responses_kit import testing

ROOT = Path(__file__).resolve().parents[1]

FRAMEWORKS = ["starlette", "fastapi", "django", "flask", "werkzeug", "uvicorn", "httpx", "sqlalchemy", "redis"]
ENGINES = ["ctransformers", "gguf", "numpy", "huggingface_hub", "jinja2", "typer", "rich", "mcp"]

FORBID_IMPORTS = """
import sys
from importlib.abc import MetaPathFinder

class Forbidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Forbidden())
"""


def run(code: str, *, without: list[str]) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that cannot import some packages."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", FORBID_IMPORTS.format(names=without) + code],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        check=False,
    )


PUBLIC = {
    "responses_kit": [
        "LMSP",
        "APIError",
        "Backend",
        "HostedTool",
        "Limits",
        "MemoryStore",
        "Model",
        "ResponsesKit",
        "Timeouts",
        "Turn",
        "errors",
        "open_store",
        "outputs",
    ],
    "responses_kit.stores": [
        "Log",
        "MemoryStore",
        "Record",
        "RedisStore",
        "ResponseStore",
        "SqlStore",
        "open_store",
    ],
    "responses_kit.backends": ["LocalBackend"],
    "responses_kit.runners": ["CeleryRunner", "LocalRunner", "Runner", "Work", "WorkerDispatch"],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_package_exports_exactly_these_names(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == PUBLIC[package]
    assert set(PUBLIC[package]) <= set(dir(module))
    assert all(hasattr(module, name) for name in PUBLIC[package])
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing


def test_outputs_are_exactly_these() -> None:
    assert set(responses_kit.outputs.__all__) == {
        "Annotation",
        "Event",
        "Finish",
        "Item",
        "LogProb",
        "Message",
        "Output",
        "Outputs",
        "Reasoning",
        "ReasoningSummary",
        "Refusal",
        "Text",
        "ToolArguments",
        "ToolCall",
        "Usage",
    }


def test_testing_package_offers_scripted_backend() -> None:
    assert "ScriptedBackend" in testing.__all__
    assert all(hasattr(testing, name) for name in testing.__all__)


def test_integrations_offer_exactly_these_names() -> None:
    assert importlib.import_module("responses_kit_flask").__all__ == ["Responses", "handle_sigterm"]
    integration = importlib.import_module("responses_kit_starlette")
    assert integration.__all__ == ["ResponsesApp", "ResponsesMiddleware", "responses_routes"]


DJANGO_SETUP = """
import importlib, pkgutil, django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=[
        *(f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages", "sessions")),
        "responses_kit_django",
    ]
)
django.setup()
import responses_kit_django
found = [module.name for module in pkgutil.walk_packages(responses_kit_django.__path__, "responses_kit_django.")]
modules = [importlib.import_module(name) for name in found if ".migrations." not in name]
"""


def test_every_django_module_has_docstring_and_valid_all() -> None:
    code = """
for module in modules:
    is_package = hasattr(module, "__path__")
    assert module.__doc__ or is_package, f"{module.__name__} has no docstring"
    for offered in getattr(module, "__all__", ()):
        assert hasattr(module, offered), f"{module.__name__}.__all__ names {offered}, which does not exist"
assert len(modules) > 10
"""
    result = run(DJANGO_SETUP + code, without=[])
    assert result.returncode == 0, result.stderr


def test_django_integration_offers_exactly_these_names() -> None:
    code = """
for name, offered in {
    "asgi": ["ResponsesASGI"],
    "signals": ["response_completed", "response_failed", "send_response_signal"],
    "store": ["OrmStore"],
    "views": ["ResponsesView"],
}.items():
    assert importlib.import_module(f"responses_kit_django.{name}").__all__ == offered, name
"""
    result = run(DJANGO_SETUP + code, without=[])
    assert result.returncode == 0, result.stderr


def modules() -> list[str]:
    found = pkgutil.walk_packages(responses_kit.__path__, "responses_kit.")
    return [module.name for module in found if not module.name.startswith("responses_kit.backends.local")]


@pytest.mark.parametrize("name", [name for name in modules() if not name.startswith("responses_kit.cli")])
def test_every_module_has_docstring_and_valid_all(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for offered in getattr(module, "__all__", ()):
        assert hasattr(module, offered), f"{name}.__all__ names {offered}, which does not exist"


def test_core_imports_without_framework_and_engine() -> None:
    needs_an_extra = (
        "responses_kit.diagnostics",
        "responses_kit.diagnostics",
        "responses_kit.cli",
        "responses_kit.tools.mcp",
        "responses_kit.stores.sql",
        "responses_kit.stores.redis",
        "responses_kit.runners.celery",
    )
    names = [name for name in modules() if not name.startswith(needs_an_extra)]
    code = f"""
import importlib
for name in {names!r}:
    importlib.import_module(name)
import responses_kit.backends
"""
    result = run(code, without=FRAMEWORKS + ENGINES)
    assert result.returncode == 0, result.stderr


def test_import_loads_no_framework_engine_or_other_loop() -> None:
    heavy = [*FRAMEWORKS, *ENGINES, "trio", "hypothesis", "pytest"]
    code = f"""
import responses_kit
loaded = {{name.partition(".")[0] for name in sys.modules}} & set({heavy!r})
assert not loaded, loaded
"""
    result = run(code, without=[])
    assert result.returncode == 0, result.stderr


def test_kit_answers_without_framework() -> None:
    code = """
import asyncio
from responses_kit import Backend, ResponsesKit

class Parrot(Backend):
    models = ["parrot"]
    async def generate(self, turn):
        yield turn.text

print(asyncio.run(ResponsesKit(Parrot()).create({"input": "Polly"}))["output"][0]["content"][0]["text"])
"""
    result = run(code, without=[*FRAMEWORKS, *ENGINES, "trio"])
    assert (result.returncode, result.stdout.strip()) == (0, "Polly"), result.stderr


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        ("responses_kit_starlette", "starlette", "starlette"),
        ("responses_kit_django", "django", "django"),
        ("responses_kit_flask", "flask", "flask"),
        ("responses_kit.adapters.wsgi_websocket", "websockets", "flask"),
        ("responses_kit.diagnostics", "httpx", "cli"),
        ("responses_kit.tools.mcp", "mcp", "mcp"),
    ],
)
def test_missing_extra_is_named_at_import(name: str, missing: str, extra: str) -> None:
    result = run(f"import {name}", without=[missing])
    assert result.returncode != 0
    assert f'pip install "responses-kit[{extra}]"' in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("package", "name", "missing", "extra"),
    [
        ("responses_kit.stores", "SqlStore", "sqlalchemy", "sql"),
        ("responses_kit.stores", "RedisStore", "redis", "redis"),
        ("responses_kit.backends", "LocalBackend", "ctransformers", "local"),
        ("responses_kit.runners", "CeleryRunner", "celery", "celery"),
    ],
)
def test_lazy_name_names_its_missing_extra(package: str, name: str, missing: str, extra: str) -> None:
    result = run(f"import {package}\nfrom {package} import {name}", without=[missing])
    assert result.returncode != 0
    assert f'pip install "responses-kit[{extra}]"' in result.stderr.splitlines()[-1]


def test_import_creates_no_event_loop() -> None:
    code = """
import asyncio, threading
real = asyncio.new_event_loop
asyncio.new_event_loop = asyncio.get_event_loop = None
import responses_kit, responses_kit.http.router, responses_kit_starlette, responses_kit_flask
import responses_kit.adapters.asgi, responses_kit.adapters.wsgi, responses_kit.adapters.wsgi_bridge
import responses_kit._concurrency.loop_thread
from responses_kit.testing import ScriptedBackend
kit = responses_kit.ResponsesKit(ScriptedBackend(["Hi"]))
responses_kit_starlette.ResponsesApp(kit)
assert threading.active_count() == 1
"""
    result = run(code, without=[])
    assert result.returncode == 0, result.stderr


def test_each_package_is_marked_as_typed() -> None:
    for package in ("responses_kit", "responses_kit_starlette", "responses_kit_django", "responses_kit_flask"):
        (folder,) = importlib.import_module(package).__path__
        assert (Path(folder) / "py.typed").exists()
