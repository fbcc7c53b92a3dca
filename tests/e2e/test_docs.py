"""The documentation: every Python snippet runs, in the order of its page, and every link resolves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.servers import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/*/README.md")])
RUNNABLE = [path for path in PAGES if path.name != "django.md" and "examples" not in path.parts]
"""Pages with snippets that run one after the other; tests/integrations/django builds a project from django.md."""

PREVIOUS = {DOCS / "guides" / "flask.md": DOCS / "get-started" / "flask.md"}
"""Pages that continue the app of another page."""

NEEDS_SERVER_OR_PROJECT = re.compile(r"# (mysite/|test_app|factory|guarded)|.*OpenAI\(", re.DOTALL)
"""Snippets that run in tests/e2e/test_cli.py and in the tests of each framework."""


def page_id(page: Path) -> str:
    """Return a page's path within the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Return the contents of a page's fenced blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.local
@pytest.mark.parametrize("page", RUNNABLE, ids=page_id)
def test_python_snippets_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # snippets may leave files
    namespace: dict[str, object] = {"__name__": "app"}  # Flask looks up its folder by this name
    for source in (PREVIOUS.get(page), page):
        for block in blocks(source, "python") if source is not None else ():
            if not NEEDS_SERVER_OR_PROJECT.match(block):
                exec(compile(block, str(source), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def test_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w-]+/[\w-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.glob("*/*.md")}


def test_state_diagram_shows_all_transitions() -> None:
    from responses_kit.protocol.state_machine import TRANSITIONS

    page = (DOCS / "explanation" / "architecture.md").read_text()
    diagram = page.partition("stateDiagram-v2")[2].partition("```")[0]
    transitions = set()
    for before, after, actions in re.findall(r"(\w+) --> (\w+): (.+)", diagram):
        transitions |= {((before, action.strip()), after) for action in actions.split(",")}
    assert transitions == set(TRANSITIONS.items())


def test_settings_page_lists_all_settings() -> None:
    import inspect
    from dataclasses import fields

    from responses_kit import Limits, ResponsesKit, Timeouts

    page = (DOCS / "reference" / "settings.md").read_text()
    expected = {
        "ResponsesKit": [name for name in inspect.signature(ResponsesKit.__init__).parameters if name != "self"],
        "Limits": [field.name for field in fields(Limits)],
        "Timeouts": [field.name for field in fields(Timeouts)],
    }
    for heading, names in expected.items():
        table = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == names, heading
