"""From the tokens of one answer to outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from ....outputs import LogProb, Output, Reasoning, Text, ToolArguments, ToolCall
from ....turn import Turn
from ...parsing.formats import CallFormat
from ...parsing.parser import Reader
from .engine import Logits
from .sampling import probabilities
from .tokenizer import Tokenizer

__all__ = ["Answer", "LogProbs"]


class Answer:
    """One answer while it is generated.

    Args:
        tokenizer: The model's tokenizer.
        dialect: How the model writes calls.
        turn: What it answers.
        thinking: The prompt has opened a span of reasoning.

    Attributes:
        logprobs: Where the client wants them.
    """

    def __init__(self, tokenizer: Tokenizer, dialect: CallFormat, turn: Turn, *, thinking: bool) -> None:
        names = [tool.name for tool in turn.callable_tools]
        self._decoder = tokenizer.decoder()
        self._reader = Reader(dialect, tools=names, thinking=thinking, max_calls=turn.max_calls)
        self.logprobs = LogProbs(tokenizer.pieces, tokenizer.control, turn.top_logprobs) if turn.logprobs else None

    @property
    def reasoning(self) -> bool:
        """Whether the last token was a part of reasoning."""
        return self._reader.reading == "reasoning"

    def feed(self, token: int) -> Sequence[Output]:
        """Takes the next token, and returns what it completes; often nothing."""
        return self._read(self._decoder.feed(token), self._reader.feed)

    def end(self, *, cut: bool) -> Sequence[Output]:
        """What was held back.

        Args:
            cut: The answer was cut by a limit.
        """
        return [
            *self._read(self._decoder.flush(), self._reader.feed),
            *self._read("", lambda _: self._reader.end(cut=cut)),
        ]

    def _read(self, text: str, read: Callable[[str], Sequence[Output]]) -> Sequence[Output]:
        if self.logprobs is None:
            return read(text)
        return self.logprobs.attached(read(self.logprobs.decoded(text)))


class LogProbs:
    """The tokens of one answer that are not in its outputs yet.

    Text may come out later than its tokens: the decoder waits for whole characters, the reader for whole tags. And of
    some tokens nothing comes out as text. The bytes of the tokens that are attached to a piece of text are always
    exactly that piece; a token of which only a part is text is attached with that part, and if more of it follows, the
    rest is a token with a probability of one.

    Args:
        pieces: The bytes of each token by id.
        control: Control tokens' ids by their text.
        top: How many likely tokens to name with each.
    """

    def __init__(self, pieces: Sequence[bytes], control: Mapping[str, int], top: int) -> None:
        self._pieces = pieces
        self._names = {token: text.encode() for text, token in control.items()}
        self._top = top
        self._torn: list[tuple[LogProb, bytes]] = []  # tokens whose characters are not whole
        self._text = ""  # of the torn tokens, what the decoder has let out
        self._waiting: deque[LogProb] = deque()  # tokens that the reader has not let out

    def add(self, token: int, logits: Logits) -> None:
        """Notes a token that was chosen.

        Args:
            token: Its id.
            logits: As the model gave them.
        """
        values, likeliest = probabilities(logits, self._top)
        top = [_entry(self._bytes(other), float(values[other])) for other in likeliest]
        piece = self._pieces[token]
        self._torn.append((_entry(piece, float(values[token]), top), piece))

    def decoded(self, text: str) -> str:
        """Takes what the decoder lets out, and returns it as soon as it is in step with the tokens."""
        self._text += text
        made, raw = self._text.encode(), b"".join(piece for _, piece in self._torn)
        if made != raw:
            if raw.startswith(made):
                return ""
            # Some bytes made no character, or the first space was not text: the first token stands for all of it, or
            # what is left of an earlier one.
            self._torn = self._torn or [(_entry(b"", 0.0), b"")]
            for index, (entry, _) in enumerate(self._torn):
                entry.bytes = list(made) if index == 0 else []
                entry.token = self._text if index == 0 else ""
        self._waiting += [entry for entry, _ in self._torn]
        self._torn.clear()
        text, self._text = self._text, ""
        return text

    def attached(self, outputs: Iterable[Output]) -> list[Output]:
        """The reader's outputs, text with its tokens.

        Args:
            outputs: What the reader made of the text that `decoded` returned.
        """
        made: list[Output] = []
        for output in outputs:
            if isinstance(output, str):
                made.append(Text(output, self._taken(output)))
                continue
            if isinstance(output, Reasoning | ToolCall | ToolArguments):
                self._taken(_content(output))
            made.append(output)
        return made

    def _taken(self, text: str) -> list[LogProb]:
        """Takes a text's tokens, and drops those before it: tags, and whatever the reader leaves out."""
        wanted, raw = text.encode(), b"".join(bytes(entry.bytes) for entry in self._waiting)
        start = 0 if raw.startswith(wanted) else raw.rfind(wanted)
        if start < 0:
            return []
        self._cut(start)
        return self._cut(len(wanted))

    def _cut(self, size: int) -> list[LogProb]:
        """Takes the first tokens that have so many bytes together; one that has more is cut in two."""
        taken: list[LogProb] = []
        while size and self._waiting:
            entry = self._waiting.popleft()
            if len(entry.bytes) > size:
                self._waiting.appendleft(_entry(bytes(entry.bytes[size:]), 0.0))
                entry = _entry(bytes(entry.bytes[:size]), entry.logprob, entry.top)
            size -= len(entry.bytes)
            taken.append(entry)
        while self._waiting and not self._waiting[0].bytes:  # what belongs to a character that is taken
            taken.append(self._waiting.popleft())
        return taken

    def _bytes(self, token: int) -> bytes:
        return self._names.get(token, self._pieces[token])


def _entry(piece: bytes, logprob: float, top: Sequence[LogProb] = ()) -> LogProb:
    return LogProb(piece.decode("utf-8", "replace"), logprob, list(piece), top)


def _content(output: Reasoning | ToolCall | ToolArguments) -> str:
    if isinstance(output, Reasoning):
        return output.text
    return output.name if isinstance(output, ToolCall) else output.delta
