"""A vocabulary of single bytes and some control tokens, to try grammars with to the letter, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from responses_kit.backends.local.gguf.header import read_header
from responses_kit.backends.local.grammar.builder import grammar
from responses_kit.backends.local.grammar.constraint import Grammars
from responses_kit.backends.local.inference.tokenizer import Tokenizer
from responses_kit.backends.parsing.formats import HERMES, CallFormat
from responses_kit.schema.request import JsonObject, JsonSchema
from responses_kit.schema.tools import FunctionTool
from responses_kit.turn import Turn

from .conversation import turn
from .tiny import BYTE, CONTROL, NORMAL, write_tiny

END = 2
"""The token that ends an answer."""


class Spelling:
    """Reads answers byte by byte.

    Args:
        folder: For the file that holds the vocabulary.
        control: Texts that are control tokens.
    """

    def __init__(self, folder: Path, *control: str) -> None:
        tokens = ["<unk>", "<s>", "</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *control]
        kinds = [CONTROL] * 3 + [NORMAL] + [BYTE] * 256 + [CONTROL] * len(control)
        fields: dict[str, Any] = {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
            "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
            "tokenizer.ggml.bos_token_id": np.uint32(1),
            "tokenizer.ggml.eos_token_id": np.uint32(END),
        }
        path = write_tiny(folder / f"bytes{len(control)}.gguf", kind="llama", fields=fields)
        self.tokenizer = Tokenizer(read_header(path))
        self.grammars = Grammars(self.tokenizer)

    def tokens(self, *parts: str | int) -> list[int]:
        """The tokens of texts and control tokens in a row."""
        made: list[int] = []
        for part in parts:
            made += [part] if isinstance(part, int) else [4 + byte for byte in part.encode()]
        return made

    def text(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return b"".join(self.tokenizer.pieces[token] for token in tokens).decode()

    def grammar(self, turn: Turn, dialect: CallFormat = HERMES, **more: Any) -> str | None:
        """The grammar of a turn's answer."""
        return grammar(turn, dialect, self.tokenizer.control, self.grammars.problem, **more)

    def reads(self, rules: str | None, *parts: str | int) -> Literal["whole", "open", "refused"]:
        """What an answer is to a grammar: whole, the beginning of one, or neither."""
        assert rules is not None
        matcher = self.grammars.constraint(rules)._matcher
        tokens = self.tokens(*parts)
        if matcher.try_consume_tokens(tokens) < len(tokens):
            return "refused"
        return "whole" if matcher.is_accepting() else "open"


def tool(name: str = "f", parameters: Any = None, **more: Any) -> FunctionTool:
    """A function tool; without parameters it takes a city."""
    if parameters is None:
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return FunctionTool.model_validate({"name": name, "parameters": parameters, **more})


def asking(text: str = "hi", *, schema: Any = None, **values: Any) -> Turn:
    """A turn; with a schema its answer is in that form, with True in any JSON object."""
    if schema is not None:
        form = JsonObject() if schema is True else JsonSchema.model_validate({"schema": schema, "strict": True})
        values["text_format"] = form
    return turn(text, **values)
