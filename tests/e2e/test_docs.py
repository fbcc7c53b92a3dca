"""Every Python snippet in the documents runs, block after block as a reader would run them, and every link leads on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.servers import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# Of django.md tests/integrations/django/test_docs_django.py makes a project.
READ_ON = [path for path in DOCUMENTS if path.name != "django.md"]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.local
@pytest.mark.parametrize("document", READ_ON, ids=lambda path: path.name)
def test_the_python_snippets_of_a_document_run_one_after_the_other(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where they may leave what they make
    namespace: dict[str, object] = {"__name__": "app"}  # in which Flask looks for its folder
    for block in blocks(document, "python"):
        if "OpenAI(" in block or re.match(r"# (mysite/|test_app|factory|guarded)", block):
            continue  # needs a server, or a project: tests/e2e/test_cli.py and the tests of each framework have them
        exec(compile(block, str(document), "exec"), namespace)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_links_of_a_document_lead_to_files_that_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_the_drawn_states_are_those_of_the_machine() -> None:
    from responses_kit.protocol.state_machine import TRANSITIONS

    drawn = set()
    diagram = (ROOT / "docs" / "architecture.md").read_text().partition("stateDiagram-v2")[2].partition("```")[0]
    for before, after, actions in re.findall(r"(\w+) --> (\w+): (.+)", diagram):
        drawn |= {((before, action.strip()), after) for action in actions.split(",")}
    assert drawn == set(TRANSITIONS.items())
