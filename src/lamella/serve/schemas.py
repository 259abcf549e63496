"""The JSON of requests and responses, with the same names as `lamella ask --json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from lamella.errors import counted
from lamella.registry import STRICT
from lamella.serve.refusals import TooLargeError
from lamella.serve.settings import Settings

TITAN = "Huygens landed on Titan on 14 January 2005. It had been carried there by Cassini."


def _whole(value: Any) -> Any:
    """Read 3.0 as 3, as JSON does."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _FailFast(FailFast):
    """Check a list up to its first fault: a list of a million faults must not become a million errors."""

    __hash__ = object.__hash__  # pydantic's cannot be part of a union


# The limits come first: around a validator, or a union with null, they are no words of JSON Schema in the description.
MOST_ANSWERS, LARGEST = 100, 1_000_000
TopK = Annotated[int, Field(ge=1, le=MOST_ANSWERS), BeforeValidator(_whole)]
Size = Annotated[int, Field(ge=1, le=LARGEST), BeforeValidator(_whole)]
Overlap = Annotated[int, Field(ge=0, le=LARGEST), BeforeValidator(_whole)]
Place = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Texts = Annotated[list[str], _FailFast()]


class Ask(BaseModel):
    """A question about one or several texts."""

    model_config = ConfigDict(
        **STRICT,
        json_schema_extra={
            "examples": [
                {"question": "When did Huygens land on Titan?", "context": TITAN},
                {
                    "question": "What carried the probe?",
                    "context": ["Titan is the largest moon of Saturn.", TITAN],
                    "model": ["default"],
                    "top_k": 3,
                },
            ]
        },
    )

    question: str = Field(min_length=1, description="The question.")
    context: str | Texts = Field(description="The text to read, or a list of texts that are ranked together.")
    model: str | Texts | None = Field(
        None, description="The name of a reader, or of several; default: the first reader that the server was given."
    )
    top_k: TopK = Field(1, description="Number of answers to return.")
    threshold: float | None = Field(
        None, description='Answer "no answer" above these null odds; default: the reader\'s own.'
    )
    answerable: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="The share of your questions that you expect to have an answer."
    )
    max_answer_length: Size | None = Field(None, description="Maximum tokens of an answer; default: the reader's own.")
    layers: bool = Field(False, description="Show which layers of the encoder each answer was read from; needs torch.")

    @property
    def contexts(self) -> list[str]:
        return [self.context] if isinstance(self.context, str) else self.context

    @property
    def model_names(self) -> list[str | None]:
        """The readers to ask, each once; None is the default."""
        if self.model is None or isinstance(self.model, str):
            return [self.model]
        return list(dict.fromkeys(self.model))


class Batch(BaseModel):
    """Several questions, answered in one stream."""

    model_config = ConfigDict(
        **STRICT,
        json_schema_extra={
            "examples": [
                {
                    "requests": [
                        {"question": "When did Huygens land on Titan?", "context": TITAN},
                        {"question": "What carried the probe?", "context": TITAN},
                    ]
                }
            ]
        },
    )

    requests: Annotated[list[Ask], _FailFast()] = Field(min_length=1, description="The questions, each as for /v1/ask.")

    @classmethod
    def check_length(cls, given: Any, limits: Settings) -> None:
        """Refuse a batch that is too long before its questions are checked."""
        requests = given.get("requests") if isinstance(given, dict) else None
        if isinstance(requests, list) and len(requests) > limits.max_batch:
            raise TooLargeError(
                f"requests: expected at most {counted(limits.max_batch, 'question')} per batch, got {len(requests):,}."
            )


class AnswerFields(BaseModel):
    """An answer: characters `start` to `end` of its context; an empty text for "no answer"."""

    answer: str
    start: int = Field(description="First character in the context, counted in Unicode code points.")
    end: int = Field(description="One past the last character.")
    probability: float | None = Field(description="Probability of the answer; all answers and no answer sum to 1.")
    score: float | None = Field(description='Share among all candidates, "no answer" included.')
    context: int = Field(default=0, description="Number of its context, if the request gave a list.")
    layers: dict[str, Any] = Field(default={}, description="Weights of the encoder's layers, if requested.")


class Passages(BaseModel):
    """How much of very long contexts was read."""

    read: int
    of: int


class Result(BaseModel):
    """The answers of one reader, best first."""

    model_config = ConfigDict(protected_namespaces=())

    model: str
    threshold: float | None = Field(description='The null odds above which "no answer" was given.')
    answers: list[AnswerFields]
    no_answer: bool = Field(description="Whether the reader found no answer.")
    na_prob: float | None = Field(description='Probability of "no answer".')
    null_score: float | None = Field(description='The null odds: score of "no answer" minus the best answer\'s.')
    best_guess: AnswerFields | None = Field(default=None, description="The best answer, if it was withheld.")
    passages: Passages | None = None
    warnings: list[str] = Field(default=[], description="Reasons to doubt the answers, if there are any.")


class AskResponse(BaseModel):
    """The answers to a question, from each reader that was asked."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "question": "When did Huygens land on Titan?",
                    "results": [
                        {
                            "model": "default",
                            "threshold": -1.43,
                            "answers": [
                                {
                                    "answer": "14 January 2005",
                                    "start": 27,
                                    "end": 42,
                                    "probability": 0.97,
                                    "score": 1.0,
                                }
                            ],
                            "no_answer": False,
                            "na_prob": 0.02,
                            "null_score": -16.5,
                        }
                    ],
                }
            ]
        }
    )

    question: str
    results: list[Result]


class ModelInfo(BaseModel):
    """A reader that can be asked."""

    model_config = ConfigDict(extra="allow")

    name: str
    default: bool = Field(description="Whether requests without a model get this reader.")
    base: str | None = Field(description="The pretrained encoder below it, if known.")
    loaded: bool = Field(description="Whether it is in memory; if not, the first question loads it.")
    shares_encoder: bool | None = Field(
        description="Whether it goes through the encoder together with other readers. Before it is "
        "loaded: as its configuration suggests, or null if that is unknown."
    )
    why: str | None = Field(default=None, description="Why it does not share its encoder.")
    bytes: int = Field(description="Size of its files.")
    weighs_layers: bool = Field(description="Whether `layers` shows anything for it.")
    calibration: dict[str, Any] | None = Field(
        default=None, description="How null scores become probabilities; null if it is not calibrated, or not loaded."
    )


class ModelList(BaseModel):
    """The readers that can be asked."""

    models: list[ModelInfo]


class ServerLimits(BaseModel):
    """What the server takes at most."""

    max_body: int = Field(description="Bytes of a request.")
    max_batch: int = Field(description="Questions per batch.")
    max_characters: int = Field(description="Characters of all contexts of a question together.")
    max_contexts: int = Field(description="Contexts of a question.")
    max_models: int = Field(description="Readers per question.")
    max_question: int = Field(description="Characters of a question.")
    max_tokens: int = Field(description="Tokens that are read for a question.")
    queue: int = Field(description="Requests accepted at the same time.")
    timeout_seconds: float = Field(description="Seconds for a request.")


class ServerStatus(BaseModel):
    """Whether the server can answer."""

    status: Literal["alive", "ready", "loading", "shutting down"]


class ServerInfo(BaseModel):
    """What the server is."""

    name: str
    version: str
    default_model: str | None = Field(description="The reader of requests without a model.")
    models: int = Field(description="How many readers can be asked.")
    loaded: int = Field(description="How many encoders or readers of their own are in memory.")
    manages_models: bool = Field(description="Whether readers can be loaded and removed by requests.")
    limits: ServerLimits


class ErrorFields(BaseModel):
    """What is wrong."""

    type: str = Field(description="For programs, such as unknown_model.")
    message: str = Field(description="For people: where, what was expected, what was found, what to do.")


class ErrorResponse(BaseModel):
    """A request that was not answered."""

    error: ErrorFields


class HuggingFaceInputs(BaseModel):
    """A question and its context."""

    model_config = ConfigDict(**STRICT)

    question: str
    context: str


class HuggingFaceParameters(BaseModel):
    """The options of the question answering pipeline."""

    model_config = ConfigDict(**STRICT)

    top_k: TopK | None = None
    doc_stride: Overlap | None = None
    max_answer_len: Size | None = None
    max_question_len: Size | None = None
    max_seq_len: Size | None = None
    handle_impossible_answer: bool | None = None
    align_to_words: bool | None = None


class HuggingFaceAsk(BaseModel):
    """A question as Hugging Face's inference clients send it."""

    model_config = ConfigDict(
        **STRICT,
        json_schema_extra={
            "examples": [
                {
                    "inputs": {"question": "When did Huygens land on Titan?", "context": TITAN},
                    "parameters": {"top_k": 2},
                }
            ]
        },
    )

    inputs: HuggingFaceInputs
    parameters: HuggingFaceParameters | None = None
    options: dict[str, Any] | None = Field(
        None, description="Ignored, such as `wait_for_model`, which clients sent to the hub."
    )


class HuggingFaceAnswer(BaseModel):
    """An answer as Hugging Face's inference clients read it."""

    score: float
    start: int
    end: int
    answer: str


class HuggingFaceError(BaseModel):
    """An error as Hugging Face's inference clients read it."""

    error: str
