"""Check the English of docstrings, comments, messages, docs and test names against the project's rules.

Usage: `python .ci/prose.py [--count] [FILE ...]`. Without files it reads the whole repository. With `--count` it prints
the rates per 1,000 words of docstrings and comments instead of failing.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PEOPLE = "who whoever whom whomever nobody somebody everybody anybody others"
VERBS = "told tell tells telling hear hears heard hearing mend mends mended mending heed heeds heeded"
PHRASES = (
    "of no matter",
    "for ever",
    "in its stead",
    "in another's stead",
    "come to an end",
    "comes to an end",
    "came to an end",
    "come to its end",
    "comes to its end",
    "come to their end",
    "come to their ends",
    "goes its way",
)
RULED_OUT = {
    "people": re.compile(rf"\b({'|'.join(PEOPLE.split())})(?:'s)?\b", re.IGNORECASE),
    "verbs": re.compile(rf"\b({'|'.join(VERBS.split())})\b", re.IGNORECASE),
    "phrases": re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE),
    "opening": re.compile(
        r"(?:^|[.!?]\s+)(What|Where|Whoever|Those|Of)\s+(?!is|are|does|do|can|happens|if\b)[a-z][^.?!]*[.:;]"
    ),
}
"""Ruled out in every text. An opening is a sentence that begins with a headless relative clause; questions are fine."""

WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
MAX_WHAT = 2.0
"""Uses of "what" per 1,000 words of docstrings and comments."""

TEST_NAME = re.compile(r"_(who|whoever|whom|nobody|somebody|everybody|what|told|tells|hears|mends)(?=_|$)")

ALLOWED = re.compile(r"`[^`\n]*`|\"[^\"\n]*\"|https?://\S+")
"""Code and quotations."""


class Finding(NamedTuple):
    """A rule that a line breaks."""

    path: Path
    line: int
    rule: str
    text: str


def texts_of_python(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line, the text and whether it is a docstring or comment, of each text in a Python file."""
    source = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(source)
    for parent in ast.walk(tree):
        for node in getattr(parent, "body", ()) if isinstance(parent, documented) else ():
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.lineno, node.value.value, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: "), True


def messages_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string literal of three words or more that is not a docstring."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
        if is_text and len(node.value.split()) >= 3:
            yield node.lineno, node.value


def names_of_tests(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each test in a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name


def texts_of_markdown(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the lines of a Markdown file outside of code blocks."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line, False


def texts_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the texts of a file by its kind."""
    return texts_of_markdown(path) if path.suffix == ".md" else texts_of_python(path)


def findings(path: Path) -> Iterator[Finding]:
    """Yield the rules that a file breaks."""
    for line, text, _ in texts_of(path):
        prose = ALLOWED.sub(lambda match: "x" * len(match.group()), text)
        for rule, pattern in RULED_OUT.items():
            for match in pattern.finditer(prose):
                yield Finding(path, line + prose.count("\n", 0, match.start()), rule, match.group().strip())
    if path.suffix == ".py" and "tests" in path.parts:
        for line, name in names_of_tests(path):
            if TEST_NAME.search(name):
                yield Finding(path, line, "test name", name)
    elif path.suffix == ".py":
        for line, text in messages_of(path):
            for rule in ("people", "verbs", "phrases"):
                for match in RULED_OUT[rule].finditer(text):
                    yield Finding(path, line, f"message, {rule}", match.group())


def rates(paths: list[Path]) -> dict[str, float]:
    """Return the uses per 1,000 words of docstrings and comments, by rule."""
    words, uses = 0, Counter[str]()
    for path in paths:
        if path.suffix == ".py":
            for _, text, is_documentation in texts_of(path):
                if is_documentation:
                    prose = ALLOWED.sub(" ", text)
                    words += len(re.findall(r"[A-Za-z']+", prose))
                    uses.update({rule: len(pattern.findall(prose)) for rule, pattern in RULED_OUT.items()})
                    uses["what"] += len(WHAT.findall(prose))
    return {"words": words, **{rule: 1000 * count / max(words, 1) for rule, count in uses.items()}}


def main() -> int:
    """Print the findings, or the rates; return the exit status."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--count"]
    root = Path(__file__).resolve().parents[1]
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],  # noqa: S607  # git is on the PATH
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [Path(argument) for argument in arguments] or [root / name for name in listed.stdout.splitlines()]
    paths = [
        path for path in paths if path.suffix in (".py", ".md") and path.is_file() and path != Path(__file__).resolve()
    ]
    measured = rates(paths)
    if "--count" in sys.argv:
        for rule, rate in measured.items():
            print(f"{rule:10}{rate:10.2f}" if rule != "words" else f"{rule:10}{rate:10.0f}")
        return 0
    found = [finding for path in paths for finding in findings(path)]
    for path, line, rule, text in found:
        print(f"{path.relative_to(root) if path.is_relative_to(root) else path}:{line}: {rule}: {text[:80]}")
    if measured.get("what", 0.0) > MAX_WHAT:
        print(
            f"'what' stands {measured['what']:.1f} times in 1,000 words of docstrings and comments; {MAX_WHAT} at most"
        )
        return 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
