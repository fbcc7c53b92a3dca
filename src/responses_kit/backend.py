"""The one protocol a model has to speak: models, and outputs for a turn.

Subclass `Backend`, name the models, write `generate`::

    class Parrot(Backend):
        models = ["parrot"]

        async def generate(self, turn):
            yield turn.text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from .outputs import Outputs
from .turn import Turn

__all__ = ["Backend", "Model"]


@dataclass(frozen=True, slots=True)
class Model:
    """A model's name and what it can do; the kit refuses up front whatever is not declared.

    Args:
        name: What clients put into `model`.
        context_window: Tokens that prompt and answer share, or None where unknown.
        vision: Accepts pictures and files in the input.
        tools: Can call function tools.
        reasoning: Honours `reasoning.effort`.
        structured_output: Honours `text.format`.
        logprobs: Can give `Text.logprobs`.
        conversations: Goes on from earlier responses, where a request names one; otherwise each request says all.
        temperature: Value used, and echoed, where the client says none; likewise the four that follow.
        owned_by: Shown in the model list.
    """

    name: str
    _: KW_ONLY
    context_window: int | None = None
    vision: bool = False
    tools: bool = False
    reasoning: bool = False
    structured_output: bool = False
    logprobs: bool = False
    conversations: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_output_tokens: int | None = None
    owned_by: str = "responses-kit"


class Backend:
    """Base class of every backend.

    Attributes:
        models: Names, or `Model` instances where the model can do more than talk. The first one answers
            requests that name none.
        bound: Whether it can only answer while its request is there, as view functions do. Then what would outlive
            that, background responses and those with an idempotency key, is refused.
    """

    models: Sequence[str | Model] = ()
    is_request_bound: bool = False

    async def admit(self, turn: Turn) -> None:
        """Refuses a turn before anything of it is kept or sent, so that the client gets a plain HTTP error.

        Here is the place for a full queue or a prompt that is too long. It must be quick: the first event waits
        for it. A turn that was admitted may never be generated, if its client leaves at once. Only the first round of
        a response is admitted; those that follow the calls of hosted tools belong to it.

        Args:
            turn: The request with its context.

        Raises:
            responses_kit.errors.APIError: The turn is refused, for the reason given.
        """

    async def count_tokens(self, turn: Turn) -> int | None:
        """How many tokens the turn's prompt takes, tools and instructions included.

        With it, and the model's `context_window`, the kit refuses what does not fit, or truncates it where the client
        asked for that. It may be called several times for one turn, with fewer and fewer items.

        Args:
            turn: The request with its context.

        Returns:
            The number of tokens, or None where the backend cannot tell; then it has to refuse or cut by itself.

        Raises:
            responses_kit.errors.APIError: The turn is refused, for the reason given.
        """
        return None

    def generate(self, turn: Turn) -> Outputs:
        """Yields the outputs of one turn.

        Write it as `async def` with `yield`, and it runs on the event loop; as a plain `def` with `yield`, and
        each turn runs in a worker thread of its own. Either may also return the outputs, or just a string.

        A client that leaves closes the generator: `GeneratorExit` is raised in a plain one at its current
        `yield`, an async one is cancelled where it awaits. `finally` blocks run.

        Args:
            turn: The request with its context.

        Returns:
            An iterable or async iterable of outputs.

        Raises:
            responses_kit.errors.APIError: Shown to the client as it is. Any other exception becomes a
                `model_error` that says nothing of it, and goes to the log.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate(self, turn)")

    async def compact(self, turn: Turn) -> str | None:
        """Sums a conversation up, for backends that have a better way than to ask the model for it.

        Args:
            turn: The whole conversation, which may be longer than the model's context window. `instructions` are those
                that the client gave the compaction; `max_output_tokens` is how long the summary should be at most.

        Returns:
            The summary, or None: then the kit asks the model, piece by piece where need be.

        Raises:
            responses_kit.errors.APIError: Shown to the client as it is. Any other exception becomes a
                `model_error` that says nothing of it, and goes to the log.
        """
        return None

    def close(self) -> None:
        """Frees what the backend holds; called once, by `ResponsesKit.aclose`."""
