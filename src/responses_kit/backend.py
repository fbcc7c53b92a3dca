"""The backend: the interface between the kit and a model.

Subclass `Backend`, list the models and define `generate`::

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
    """A model's name and capabilities. The kit refuses requests for capabilities that are not declared.

    Args:
        name: The value of `model` in requests.
        context_window: The number of tokens for prompt and answer together, or None if unknown.
        vision: Whether the input may contain images, files and videos.
        tools: Whether the model can call function tools.
        reasoning: Whether the model supports `reasoning.effort`.
        structured_output: Whether the model supports `text.format`.
        logprobs: Whether the model can report `Text.logprobs`.
        conversations: Whether the model supports `previous_response_id`. If not, each request must contain the whole
            conversation.
        temperature: The default of requests that omit the parameter.
        top_p: As `temperature`.
        presence_penalty: As `temperature`.
        frequency_penalty: As `temperature`.
        max_output_tokens: As `temperature`; None for as many as fit.
        owned_by: The value of `owned_by` in the list of models.
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
    """The base class of all backends.

    Attributes:
        models: Names, or `Model` instances for models with capabilities. The first one answers requests without a
            `model`.
        is_request_bound: Whether the backend can answer only during its HTTP request, as view functions do. The kit
            then refuses background responses and idempotency keys.
    """

    models: Sequence[str | Model] = ()
    is_request_bound: bool = False

    async def admit(self, turn: Turn) -> None:
        """Refuse a turn before the response is saved or sent, so that the client receives a plain HTTP error.

        Use it for a full queue or a prompt that is too long. It must be fast, because it delays the first event. If the
        client leaves early, an admitted turn is not generated. Called for the first round of a response only, not for
        the rounds after calls of hosted tools.

        Args:
            turn: The request with its context.

        Raises:
            responses_kit.errors.APIError: The turn is refused.
        """

    async def count_tokens(self, turn: Turn) -> int | None:
        """Return the number of tokens of the turn's prompt, including tools and instructions.

        With it and the model's `context_window`, the kit refuses a prompt that does not fit, or truncates it if the
        client requested that. May be called several times for one turn, with fewer items each time.

        Args:
            turn: The request with its context.

        Returns:
            The number of tokens, or None if it is unknown. The backend must then refuse or truncate by itself.

        Raises:
            responses_kit.errors.APIError: The turn is refused.
        """
        return None

    def generate(self, turn: Turn) -> Outputs:
        """Yield the outputs of one turn.

        As `async def` it runs on the event loop; as plain `def` it runs in a worker thread per turn. Instead of
        yielding, it may return an iterable of outputs or a string.

        If the client leaves, a plain generator receives `GeneratorExit` at its current `yield`, and an async one is
        cancelled at its current await. `finally` blocks run.

        Args:
            turn: The request with its context.

        Returns:
            An iterable or async iterable of outputs.

        Raises:
            responses_kit.errors.APIError: Sent to the client unchanged. Any other exception is logged and becomes a
                `model_error` without details.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate(self, turn)")

    async def compact(self, turn: Turn) -> str | None:
        """Return a summary of a conversation, for backends with a better method than generating one.

        Args:
            turn: The whole conversation, which may exceed the model's context window. `instructions` are those of the
                compaction request; `max_output_tokens` is the maximum length of the summary.

        Returns:
            The summary, or None to let the kit generate it with the model, in several pieces if necessary.

        Raises:
            responses_kit.errors.APIError: Sent to the client unchanged. Any other exception is logged and becomes a
                `model_error` without details.
        """
        return None

    def close(self) -> None:
        """Release the backend's resources. Called once, by `ResponsesKit.aclose`."""
