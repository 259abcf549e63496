"""The settings of a server: what it serves, to whom, and the limits that keep it responsive."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lamella.models.loading import Backend, Precision

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Settings:
    """All options of a server, and its fixed limits."""

    models: tuple[str, ...] = ()  # readers by name or folder, the first is the default; empty: the packaged reader
    folder: Path | None = None  # each folder in it that holds a model is served; corrections are kept here
    manages: bool = True  # with a folder, clients may load and remove readers, and correct and adapt them
    keys: tuple[str, ...] = field(default=(), repr=False)  # bearer keys; empty: everyone may ask
    cors: tuple[str, ...] = ()  # origins of other web pages that may ask
    hosts: tuple[str, ...] | None = None  # names of this server in the header Host; None: any

    precision: Precision = "auto"
    backend: Backend = "auto"
    device: str | None = None
    threads: int | None = None  # of onnxruntime; None: all cores
    memory: int | None = None  # for the tensors of readers that share an encoder; None: as the device has room
    most_loaded: int = 8  # encoders in memory, each of one reader or shared by many

    batch_tokens: int = 16_384  # most tokens that the encoder gets at once
    workers: int = 32  # threads that answer lists of questions; their windows share the encoder
    queue: int = 128  # requests accepted at the same time, those being answered included; 429 beyond
    timeout: float = 30.0  # seconds for a request from its acceptance on; 503 beyond
    body_timeout: float = 10.0  # seconds in which a client must have sent its request; 408 beyond
    write_timeout: float = 30.0  # seconds in which a client must read a part of its response
    stream_timeout: float = 300.0  # seconds that a batch waits for its client to read lines, in all

    max_body: int = 4 * MEBIBYTE  # bytes
    body_memory: int = 64 * MEBIBYTE  # bytes of requests that are being sent or parsed, in all; 429 beyond
    max_contexts: int = 100
    max_characters: int = 2_000_000  # of all contexts of a question together
    max_tokens: int = 100_000  # of what is read of them; 200,000 characters of English have 45,000
    max_question: int = 5_000  # characters
    max_models: int = 8  # per question
    max_top_k: int = 100
    max_batch: int = 256  # questions per batch
    passage_characters: int = 2_000_000  # of the long texts whose passages are kept, for all readers together
    token_cache: int = 64 * MEBIBYTE  # for the tokens of contexts that are asked about again
