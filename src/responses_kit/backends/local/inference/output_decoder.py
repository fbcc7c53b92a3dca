"""Decoding of the tokens of one answer to outputs, with their log probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from ....outputs import LogProb, Output, Reasoning, Text, ToolArguments, ToolCall
from ....turn import Turn
from ...parsing.formats import CallFormat
from ...parsing.parser import Parser
from .engine import Logits
from .sampling import log_probabilities
from .tokenizer import Tokenizer

__all__ = ["LogProbTracker", "OutputDecoder"]


class OutputDecoder:
    """An incremental decoder from the tokens of one answer to outputs.

    Args:
        tokenizer: The model's tokenizer.
        call_format: The format in which the model writes calls.
        turn: The turn that is answered.
        in_reasoning: Whether the prompt ends within a span of reasoning.

    Attributes:
        logprobs: Tracks the log probabilities of tokens, or None if the client did not request them.
    """

    def __init__(self, tokenizer: Tokenizer, call_format: CallFormat, turn: Turn, *, in_reasoning: bool) -> None:
        names = [tool.name for tool in turn.callable_tools]
        self._decoder = tokenizer.decoder()
        self._parser = Parser(call_format, tools=names, in_reasoning=in_reasoning, max_calls=turn.max_calls)
        self.logprobs = (
            LogProbTracker(tokenizer.token_bytes, tokenizer.control_tokens, turn.top_logprobs)
            if turn.logprobs
            else None
        )

    @property
    def is_reasoning(self) -> bool:
        """Whether the last token was part of reasoning."""
        return self._parser.state == "reasoning"

    def feed(self, token: int) -> Sequence[Output]:
        """Return the outputs that the next token completes, often none."""
        return self._parse(self._decoder.feed(token), self._parser.feed)

    def finish(self, *, truncated: bool) -> Sequence[Output]:
        """Return the buffered outputs at the end of the answer.

        Args:
            truncated: Whether a limit cut off the answer.
        """
        return [
            *self._parse(self._decoder.flush(), self._parser.feed),
            *self._parse("", lambda _: self._parser.finish(truncated=truncated)),
        ]

    def _parse(self, text: str, parse: Callable[[str], Sequence[Output]]) -> Sequence[Output]:
        if self.logprobs is None:
            return parse(text)
        return self.logprobs.attach(parse(self.logprobs.release(text)))


class LogProbTracker:
    """The tokens of one answer that are not part of an output yet, with their log probabilities.

    Text may be returned later than its tokens, because the decoder buffers incomplete characters and the parser
    incomplete tags; some tokens are not returned as text at all. The bytes of the tokens that are attached to a text
    are exactly the bytes of that text. A token that is partly text is attached with that part; if its rest is text,
    too, the rest is attached as a token with a probability of one.

    Args:
        token_bytes: The bytes of each token, by id.
        control_tokens: The ids of control tokens by their text.
        top: The number of most likely tokens to include with each token.
    """

    def __init__(self, token_bytes: Sequence[bytes], control_tokens: Mapping[str, int], top: int) -> None:
        self._token_bytes = token_bytes
        self._control_texts = {token: text.encode() for text, token in control_tokens.items()}
        self._top = top
        self._incomplete: list[tuple[LogProb, bytes]] = []  # tokens of characters that the decoder buffers
        self._incomplete_text = ""  # decoded text of the incomplete tokens
        self._unattached: deque[LogProb] = deque()  # tokens of text that the parser buffers

    def add(self, token: int, logits: Logits) -> None:
        """Record a sampled token.

        Args:
            token: Its id.
            logits: The model's logits, before penalties and constraints.
        """
        values, most_likely = log_probabilities(logits, self._top)
        top = [_entry(self._get_bytes(other), float(values[other])) for other in most_likely]
        data = self._token_bytes[token]
        self._incomplete.append((_entry(data, float(values[token]), top), data))

    def release(self, text: str) -> str:
        """Return the decoder's text up to the point at which it consists of complete tokens.

        Args:
            text: The decoder's next text.
        """
        self._incomplete_text += text
        decoded, raw = self._incomplete_text.encode(), b"".join(data for _, data in self._incomplete)
        if decoded != raw:
            if raw.startswith(decoded):
                return ""
            # The bytes are invalid UTF-8, or the decoder removed the first space. The first token, or the rest of an
            # earlier one, then stands for the whole text.
            self._incomplete = self._incomplete or [(_entry(b"", 0.0), b"")]
            for index, (entry, _) in enumerate(self._incomplete):
                entry.bytes = list(decoded) if index == 0 else []
                entry.token = self._incomplete_text if index == 0 else ""
        self._unattached += [entry for entry, _ in self._incomplete]
        self._incomplete.clear()
        text, self._incomplete_text = self._incomplete_text, ""
        return text

    def attach(self, outputs: Iterable[Output]) -> list[Output]:
        """Return the parser's outputs with the tokens of each text.

        Args:
            outputs: The parser's outputs for the text that `release` returned.
        """
        attached: list[Output] = []
        for output in outputs:
            if isinstance(output, str):
                attached.append(Text(output, self._pop_tokens(output)))
                continue
            if isinstance(output, Reasoning | ToolCall | ToolArguments):
                self._pop_tokens(_content(output))
            attached.append(output)
        return attached

    def _pop_tokens(self, text: str) -> list[LogProb]:
        """Remove and return the tokens of a text; tokens before it, such as tags, are discarded."""
        data, raw = text.encode(), b"".join(bytes(entry.bytes) for entry in self._unattached)
        start = 0 if raw.startswith(data) else raw.rfind(data)
        if start < 0:
            return []
        self._pop_bytes(start)
        return self._pop_bytes(len(data))

    def _pop_bytes(self, size: int) -> list[LogProb]:
        """Remove and return the tokens of the next `size` bytes; the last token is split if necessary."""
        popped: list[LogProb] = []
        while size and self._unattached:
            entry = self._unattached.popleft()
            if len(entry.bytes) > size:
                self._unattached.appendleft(_entry(bytes(entry.bytes[size:]), 0.0))
                entry = _entry(bytes(entry.bytes[:size]), entry.logprob, entry.top)
            size -= len(entry.bytes)
            popped.append(entry)
        while self._unattached and not self._unattached[0].bytes:  # tokens without bytes belong to the one before
            popped.append(self._unattached.popleft())
        return popped

    def _get_bytes(self, token: int) -> bytes:
        return self._control_texts.get(token, self._token_bytes[token])


def _entry(data: bytes, logprob: float, top: Sequence[LogProb] = ()) -> LogProb:
    return LogProb(data.decode("utf-8", "replace"), logprob, list(data), top)


def _content(output: Reasoning | ToolCall | ToolArguments) -> str:
    if isinstance(output, Reasoning):
        return output.text
    return output.name if isinstance(output, ToolCall) else output.delta
