"""Fixtures of all tests: no network, a folder for real data, the command line in this process."""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from forks import ForkServer

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
_cache = tempfile.TemporaryDirectory(prefix="lamella-cache-")  # removed when Python ends
os.environ["LAMELLA_CACHE"] = _cache.name  # never the user's own

# A busy machine must not fail a test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

READ: dict[tuple[Any, ...], Any] = {}  # the encoders that `read_once` has read

# Test files that need torch. `make test-light` runs all others without it; in those, `samples.needs_torch` marks the
# single tests that need it. A file that needs torch but is not listed here fails there.
HAS_TORCH = importlib.util.find_spec("torch") is not None
if not HAS_TORCH:
    collect_ignore_glob = [
        *("contracts/*", "encoder/*", "export/*", "faults", "graph/*", "heads/*", "sweep/*", "training/*"),
        *(f"data/test_{name}.py" for name in ("batches", "feature_cache", "features", "feed", "padding")),
        *(f"flows/test_{name}.py" for name in ("benchmarks", "commands", "documents", "korean", "outputs")),
        *(f"flows/test_{name}.py" for name in ("missing_libraries", "papers", "plugin", "python_pages", "reproduce")),
        "flows/test_tuned_training.py",
        *(f"inference/test_{name}.py" for name in ("answer_layers", "ensemble", "reader", "several_contexts")),
        *(f"models/test_{name}.py" for name in ("base_identity", "card", "default_reader", "model", "shipped_models")),
        *(f"models/test_{name}.py" for name in ("base_tokenizer", "recorded", "rounded_base", "token_ids")),
        *(f"models/test_{name}.py" for name in ("checkpoint_sizes", "torch_encoders")),
        *(f"numbers/test_{name}.py" for name in ("bert_parity", "formulas", "learning", "overfit", "paper_counts")),
        "numbers/test_trainer_parity.py",
        *("scoring/test_cost.py", "scoring/test_evaluate.py"),
        *("study/test_classifiers.py", "study/test_layer_weights.py", "study/test_scores_per_question.py"),
        "test_api.py",
        "test_plugins.py",
        "browser/test_page.py",
    ]

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real data sets; tests that need it are skipped if it is missing."""
    if not (REAL_DATA / "cs224n-dev.json.gz").is_file():
        pytest.skip("real data sets are not beside the checkout (../shared/data)")
    return REAL_DATA


@pytest.fixture(scope="session", autouse=True)
def same_backend() -> Iterator[None]:
    """Load models in fp32 on onnxruntime on every processor: with AMX, `auto` would choose bf16 on torch."""
    from lamella import environment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "CPU_INFO", Path(_cache.name) / "no-cpuinfo")
        yield


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """Restore oneDNN: after a bf16 product on a processor without bf16, PyTorch stops using it and sums change."""
    yield
    if "torch" in sys.modules:
        import torch

        torch.backends.mkldnn.set_flags(True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: tiny tensors are slower on several, up to ten times on a busy machine."""
    if not HAS_TORCH:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train on the CPU even if there is a GPU, whose sums have no fixed order and are not reproducible."""
    if not HAS_TORCH:
        yield
        return
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each pretrained encoder once and copy it after that: reading takes longer than the rest of most tests.

    For tests of what is done with encoders, not of how they are read. A file that has changed is read again.
    """
    from lamella.models import base_encoder

    load_pretrained = base_encoder.load_pretrained

    def load_once(source: Any, **options: Any) -> Any:
        files = tuple((path.name, path.stat().st_mtime_ns) for path in sorted(source.folder.iterdir()))
        key = (source.folder, files, *sorted(options.items()))
        if key not in READ:
            READ[key] = load_pretrained(source, **options)
        return copy.deepcopy(READ[key])

    monkeypatch.setattr(base_encoder, "load_pretrained", load_once)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """The command line in processes of its own: `code, out, err = forks.run("check", path)`."""
    server = ForkServer(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()


@pytest.fixture
def lamella(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: `code, out, err = lamella("check", path)`."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from lamella.__main__ import main

        monkeypatch.setattr(sys, "argv", ["lamella", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
