"""A vocabulary of single bytes and control tokens, to test grammars byte by byte and without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from responses_kit.backends.local.gguf.header import read_header
from responses_kit.backends.local.grammar.builder import build_grammar
from responses_kit.backends.local.grammar.constraint import GrammarCompiler
from responses_kit.backends.local.inference.tokenizer import Tokenizer
from responses_kit.backends.parsing.formats import HERMES, CallFormat
from responses_kit.schema.request import JsonObject, JsonSchema
from responses_kit.schema.tools import FunctionTool
from responses_kit.turn import Turn

from .conversation import turn
from .tiny import BYTE, CONTROL, NORMAL, write_tiny

END = 2
"""The id of the token that ends an answer."""


class ByteVocabulary:
    """A tokenizer with one token per byte, and its grammars.

    Args:
        folder: A directory for the file that holds the vocabulary.
        control: Texts that are control tokens.
    """

    def __init__(self, folder: Path, *control: str) -> None:
        tokens = ["<unk>", "<s>", "</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *control]
        types = [CONTROL] * 3 + [NORMAL] + [BYTE] * 256 + [CONTROL] * len(control)
        fields: dict[str, Any] = {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
            "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
            "tokenizer.ggml.bos_token_id": np.uint32(1),
            "tokenizer.ggml.eos_token_id": np.uint32(END),
        }
        path = write_tiny(folder / f"bytes{len(control)}.gguf", kind="llama", fields=fields)
        self.tokenizer = Tokenizer(read_header(path))
        self.compiler = GrammarCompiler(self.tokenizer)

    def tokens(self, *parts: str | int) -> list[int]:
        """Return the tokens of texts and control tokens."""
        tokens: list[int] = []
        for part in parts:
            tokens += [part] if isinstance(part, int) else [4 + byte for byte in part.encode()]
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return b"".join(self.tokenizer.token_bytes[token] for token in tokens).decode()

    def grammar(self, turn: Turn, call_format: CallFormat = HERMES, **more: Any) -> str | None:
        """Return the grammar of a turn's answer."""
        return build_grammar(turn, call_format, self.tokenizer.control_tokens, self.compiler.find_problem, **more)

    def match(self, rules: str | None, *parts: str | int) -> Literal["complete", "partial", "refused"]:
        """Return whether a grammar accepts an answer, as it is or as the beginning of one."""
        assert rules is not None
        matcher = self.compiler.compile(rules)._matcher
        tokens = self.tokens(*parts)
        if matcher.try_consume_tokens(tokens) < len(tokens):
            return "refused"
        return "complete" if matcher.is_accepting() else "partial"


def tool(name: str = "f", parameters: Any = None, **more: Any) -> FunctionTool:
    """Return a function tool; by default its argument is a city."""
    if parameters is None:
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return FunctionTool.model_validate({"name": name, "parameters": parameters, **more})


def make_turn(text: str = "hi", *, schema: Any = None, **values: Any) -> Turn:
    """Return a turn with a schema as its format, or any JSON object if the schema is True."""
    if schema is not None:
        text_format = JsonObject() if schema is True else JsonSchema.model_validate({"schema": schema, "strict": True})
        values["text_format"] = text_format
    return turn(text, **values)
