"""Measure windows per second of full fine-tuning, against `transformers.Trainer` set up as in its `run_qa.py`.

    python benchmarks/train_speed.py [--quick] [--out train_speed.json]
    python benchmarks/train_speed.py --device cuda --encoder FOLDER --data squad-train.json [--out train_speed.json]

The peer takes windows padded to 384 tokens in random order; ours takes batches of similar length, padded to their
longest window. The rest is the same: encoder, windows and labels, batch size, precision (fp32 on the CPU, bf16 on a
GPU), dropout, AdamW, learning rate, clipping. Both sides read windows that were cut beforehand from memory, where
`run_qa.py` reads a file. Our batches differ in length, so ours runs whole epochs; the peer's are all alike, so a few
steps are enough. Neither side times its first step. A GPU is slow on the first batches of any shape, so there our first
two epochs are not timed either, and the script also reports how busy the GPU was, which share of its limit the
encoder's operations reach, and which share of the tokens per second of the plain encoder. The limit is the speed of one
large bf16 product. The plain encoder is the model of transformers in bf16, forward and backward on windows of 384
tokens without padding, and without head, loss and optimiser. `--compile` sets `training.compile` for our side.

`--out` writes one object. A file that holds a list (initially `[]`), such as `results/speed.json`, keeps its rows; the
new object replaces the row for the same encoder, device, batch size and `--compile`, or is added.

Text comes from `--data` (any file in SQuAD format; the last tenth of its questions is the dev set) or from the bundled
set: the text around every answer, cut to the lengths of SQuAD's contexts.

Without `--quick`, both sides also train to the end with three seeds. The same code computes all dev losses, without
padding; the verdict is where our median lies in the peer's range.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from lamella.config import DEFAULT_ENCODER, LearnerOptions, RunConfig, TrainingOptions, WindowOptions
from lamella.data.dataset import load_examples
from lamella.data.examples import Answer, Context, Example
from lamella.data.windows.batches import Totals, collate
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.padding import longest_first
from lamella.encoder.compiled_layers import compile_layers
from lamella.encoder.encoder import family_of
from lamella.encoder.pretrained import load_tokenizer, quiet
from lamella.encoder.sources import find_encoder
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.heads.losses import CrossEntropy
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.scoring.cost import model_cost, sample_window
from lamella.training.fitting.learner import Learner, Record, make_learner
from lamella.training.fitting.loop import fit
from lamella.training.fitting.processes import Processes
from lamella.training.fitting.steps import Position, Step, Steps

# The distribution of context lengths in characters. They are a little below SQuAD's, because the bundled text has more
# tokens per character. The windows match SQuAD's: 172 tokens on average, half of them between 127 and 206.
SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
CHARACTERS = (140, 275, 500, 645, 850, 1260, 1700, 3000)
WINDOWS = WindowOptions(max_seq_length=384, doc_stride=128)
LEARNER = LearnerOptions(learning_rate=1e-4, weight_decay=0.0, schedule={"name": "linear", "warmup": 0.0})
EPOCHS = 2  # when dev losses are compared

Padded = list[dict[str, Any]]  # the peer's windows


@dataclass(frozen=True)
class Size:
    """The amount of training."""

    batch: int
    questions: int  # per epoch of ours
    epochs: int  # timed epochs of ours
    peer_steps: int  # the first of them is not timed
    repeats: int
    learnt: int = 0  # training questions when dev losses are compared; 0: no comparison
    scored: int = 0  # dev questions
    seeds: int = 3


# On the CPU epochs are short, and sized so that their last batch is full, like nearly all batches of a large set.
SIZES = {
    ("cpu", True): Size(batch=12, questions=47, epochs=1, peer_steps=2, repeats=2),
    ("cpu", False): Size(batch=16, questions=158, epochs=1, peer_steps=5, repeats=5, learnt=158, scored=96),
    ("cuda", True): Size(batch=128, questions=6400, epochs=4, peer_steps=26, repeats=5),
    ("cuda", False): Size(batch=128, questions=6400, epochs=4, peer_steps=51, repeats=7, learnt=6400, scored=1600),
}


@dataclass(frozen=True)
class Setup:
    """The settings that both sides share."""

    encoder: str
    device: str
    batch: int
    compile: bool = False  # ours

    @property
    def precision(self) -> str:
        return "bf16" if self.device == "cuda" else "fp32"

    def wait(self) -> None:
        """Wait until the GPU has finished: it runs its commands asynchronously."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file; if it holds a list, as a row")
    parser.add_argument("--quick", action="store_true", help="a handful of steps, and no dev loss")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--encoder", default=DEFAULT_ENCODER, help="a folder, a packaged encoder or a hub id")
    parser.add_argument("--data", help="a file in SQuAD format; default: text made from the bundled set")
    parser.add_argument("--batch", type=int, help="windows per batch; default: 16, with --quick 12; on a GPU 128")
    parser.add_argument("--compile", action="store_true", help="compile the layers of our encoder; needs a GPU")
    parser.add_argument(
        "--repeats", type=int, help="measurements of each side, in turn; the default depends on --quick"
    )
    arguments = parser.parse_args()
    size = SIZES[arguments.device, arguments.quick]
    size = replace(size, repeats=arguments.repeats or size.repeats)
    setup = Setup(arguments.encoder, arguments.device, arguments.batch or size.batch, arguments.compile)

    train, dev = questions(arguments.data, size)
    tokenizer = load_tokenizer(find_encoder(setup.encoder))
    features = featurise(train[: size.questions], tokenizer, WINDOWS)
    padded = rows(features)
    kind = AutoConfig.from_pretrained(find_encoder(setup.encoder).folder).model_type
    if not family_of(kind, setup.encoder).token_types:
        for row in padded:
            del row["token_type_ids"]
    timers: dict[str, list[Timer]] = {"ours": [], "peer": []}
    for turn in range(size.repeats):  # in turn, so that load affects both alike
        timers["peer"].append(time_peer(setup, padded, size.peer_steps, seed=turn))
        timers["ours"].append(time_ours(setup, features, size.epochs, seed=turn))
    ours, peer = ([timer.windows_per_second for timer in timers[who]] for who in ("ours", "peer"))
    busy = {who: [statistics.median(timer.percents) for timer in own if timer.percents] for who, own in timers.items()}
    ratios = [mine / its for mine, its in zip(ours, peer, strict=True)]
    losses = compare_losses(setup, train[: size.learnt], dev, tokenizer, size.seeds) if size.learnt else None

    result = {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "unit": "windows/s",
        "work": {
            "flops": training_flops(setup, features),
            "precision": setup.precision,
            "threads": torch.get_num_threads(),
            "of": "the products of forward and backward",
        },
        **(limits(setup, features, statistics.median(ours), statistics.median(peer)) if setup.device == "cuda" else {}),
        **(
            {"gpu_busy_percent": {who: statistics.mean(some) for who, some in busy.items()}}
            if all(busy.values())
            else {}
        ),
        "dev_loss": losses,
        "device": torch.cuda.get_device_name() if setup.device == "cuda" else "cpu",
        "precision": setup.precision,
        "encoder": Path(setup.encoder).name,
        "data": Path(arguments.data).name if arguments.data else "the bundled set, at SQuAD's lengths",
        "mean_length": float(features.lengths.mean()),
        "batch_size": setup.batch,
        "compile": setup.compile,
        "repeats": size.repeats,
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
    }
    if arguments.out:
        write_json(arguments.out, with_row(arguments.out, result))
    print(
        f"{result['encoder']} on {result['device']}, {setup.precision}, batches of {setup.batch} windows of "
        f"{result['mean_length']:.0f} tokens on average: {result['ours']:.1f} windows/s ours, {result['peer']:.1f} peer"
    )
    if "share_of_limit" in result:
        print(
            f"of {result['limit_tflops']:.0f} TFLOP/s: {100 * result['share_of_limit']['ours']:.1f} % ours, "
            f"{100 * result['share_of_limit']['peer']:.1f} % peer; GPU busy {result.get('gpu_busy_percent')}"
        )
        print(
            f"of {result['plain_tokens_per_second']:,.0f} tokens/s of the plain encoder: "
            f"{100 * result['share_of_plain']:.0f} % ours"
        )
    print(f"dev loss: {losses['verdict']}" if losses else "dev loss: not compared in a quick run")
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    print(f"train_speed: {result['ratio']:.1f} x the windows per second of transformers.Trainer ({spread})")


def with_row(path: Path, result: dict[str, Any]) -> Any:
    """Return what to write: the numbers alone, or the list in the file with them as a row."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if not isinstance(rows, list):
        return result
    keys = ("encoder", "device", "batch_size", "compile")
    same = [all(row.get(key, False) == result.get(key, False) for key in keys) for row in rows]
    at = same.index(True) if True in same else len(rows)
    return [*rows[:at], result, *rows[at + 1 :]]


class Timer:
    """Measures from the end of the first step to the end of the last: seconds, and how busy the GPU was."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.windows, self.began, self.ended = setup, 0, 0.0, 0.0
        self.driver: subprocess.Popen[str] | None = None
        self.percents: list[float] = []  # share of time that the GPU was busy, as sampled by its driver

    @property
    def windows_per_second(self) -> float:
        return self.windows / (self.ended - self.began)

    def start(self) -> None:
        self.setup.wait()
        if self.setup.device == "cuda" and shutil.which("nvidia-smi"):
            ask = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=200"]
            self.driver = subprocess.Popen(ask, stdout=subprocess.PIPE, text=True)
        self.began = time.perf_counter()

    def stop(self) -> None:
        self.setup.wait()
        self.ended = time.perf_counter()
        if self.driver is not None:
            self.driver.terminate()
            self.percents = [float(line) for line in self.driver.communicate()[0].split()]


def time_ours(setup: Setup, features: Features, epochs: int, *, seed: int) -> Timer:
    """Time all steps but the first of some epochs, after a warm-up."""
    model = make_model(setup, seed)
    # A GPU is slow on the first two batches of every shape. The peer has one shape, so one step is enough warm-up.
    first = TrainingOptions(epochs=2, batch_size=setup.batch, order_seed=seed)
    if setup.device == "cpu":
        first = TrainingOptions(max_steps=1, batch_size=setup.batch, order_seed=seed)
    options = TrainingOptions(epochs=epochs, batch_size=setup.batch, order_seed=seed)
    before, timed = Steps(lambda epoch: features, first, [1.0]), TimedSteps(setup, features, options)
    learner = make_learner(model, LEARNER, before.total + timed.total)
    train_ours(setup, learner, before, first)
    train_ours(setup, learner, timed, options)
    return timed.timer


class TimedSteps(Steps):
    """The steps of a training, timed like the peer's."""

    def __init__(self, setup: Setup, features: Features, options: TrainingOptions) -> None:
        super().__init__(lambda epoch: features, options, [1.0])
        self.timer = Timer(setup)

    def after(self, position: Position) -> Iterator[Step]:
        for step in super().after(position):
            yield step  # resumes when the loop asks for the next step
            if self.timer.began:
                self.timer.windows += sum(map(len, step.batches))
            else:
                self.timer.start()
        self.timer.stop()


def make_model(setup: Setup, seed: int) -> ReaderModel:
    torch.manual_seed(seed)
    model = ReaderModel(load_encoder(setup.encoder), RunConfig(windows=WINDOWS)).to(setup.device)
    model.precision = setup.precision
    if setup.compile:
        compile_layers(model.encoder)
    return model


def train_ours(setup: Setup, learner: Learner, steps: Steps, options: TrainingOptions) -> None:
    fit([learner], steps, options, Processes(Accelerator(cpu=setup.device == "cpu")), Quiet())


def limits(setup: Setup, features: Features, ours: float, peer: float) -> dict[str, Any]:
    """Return the limit of the device and the share of it that the encoder's operations reach."""
    flops = training_flops(setup, features)
    a, b = (torch.randn(8192, 8192, device=setup.device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        setup.wait()
        began = time.perf_counter()
        a @ b
        setup.wait()
        times.append(time.perf_counter() - began)
    limit = 2 * 8192**3 / statistics.median(times)
    plain = plain_tokens_per_second(setup)
    return {
        "plain_tokens_per_second": plain,
        "share_of_plain": ours * float(features.lengths.mean()) / plain,
        "training_flops_per_window": flops,
        "limit_tflops": limit / 1e12,
        "share_of_limit": {"ours": ours * flops / limit, "peer": peer * flops / limit},
    }


def plain_tokens_per_second(setup: Setup) -> float:
    """Return the speed of the model of transformers, forward and backward on full windows."""
    folder = find_encoder(setup.encoder).folder
    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16).to(setup.device).train()
    ids = torch.randint(1000, 20000, (setup.batch, WINDOWS.max_seq_length), device=setup.device)
    times = []
    for _ in range(25):
        setup.wait()
        began = time.perf_counter()
        model(input_ids=ids).last_hidden_state.sum().backward()
        setup.wait()
        times.append(time.perf_counter() - began)
        model.zero_grad()
    return ids.numel() / statistics.median(times[5:])


def training_flops(setup: Setup, features: Features) -> int:
    """Return the operations of training on a window of about the mean length."""
    model = make_model(setup, 0)
    return int(model_cost(model, sample_window(model, features))["training_flops_per_window"])


class Quiet:
    """Bookkeeping that does nothing."""

    def write_history(self, learner: Learner, records: Sequence[Record]) -> None: ...

    def evaluate(self, learners: Sequence[Learner], step: int, epoch: float) -> None: ...

    def save_models(self, learners: Sequence[Learner], epoch: float) -> None: ...

    def save_checkpoint(self, position: Position) -> None: ...


def time_peer(setup: Setup, padded: Padded, steps: int, *, seed: int) -> Timer:
    """Time all steps but the first."""
    clock = Clock(setup)
    train_peer(setup, padded, seed, callbacks=[clock], max_steps=steps)
    clock.timer.windows = setup.batch * (steps - 1)
    return clock.timer


class Clock(TrainerCallback):
    """Starts a timer at the end of the first step, and stops it at the end of the last."""

    def __init__(self, setup: Setup) -> None:
        self.timer = Timer(setup)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 1:
            self.timer.start()
        if state.global_step == state.max_steps:
            self.timer.stop()


def train_peer(
    setup: Setup, padded: Padded, seed: int, *, callbacks: Sequence[TrainerCallback] = (), **length: Any
) -> PreTrainedModel:
    """Run the Trainer with its defaults, except for the options of LEARNER; nothing is written."""
    torch.manual_seed(seed)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        model = AutoModelForQuestionAnswering.from_pretrained(find_encoder(setup.encoder).folder, dtype=torch.float32)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=setup.batch,
                learning_rate=LEARNER.learning_rate,
                weight_decay=LEARNER.weight_decay,
                max_grad_norm=LEARNER.max_grad_norm,
                use_cpu=setup.device == "cpu",
                bf16=setup.precision == "bf16",
                seed=seed,
                remove_unused_columns=False,  # there are none
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                **length,
            ),
            train_dataset=padded,
            data_collator=default_data_collator,
            callbacks=list(callbacks),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    gc.collect()  # a trainer and its callbacks refer to each other and so keep the weights alive until collected
    return model


def compare_losses(
    setup: Setup, train: Sequence[Example], dev: Sequence[Example], tokenizer: Any, seeds: int
) -> dict[str, Any]:
    """Return the dev losses of both after the same training, and where ours lie in the range of the peer's."""
    features, dev_windows = (featurise(examples, tokenizer, WINDOWS) for examples in (train, dev))
    padded = rows(features)
    options = TrainingOptions(epochs=EPOCHS, batch_size=setup.batch)
    ours, peer = [], []
    for seed in range(seeds):
        model = make_model(setup, seed)
        options = options.model_copy(update={"order_seed": seed})
        steps = Steps(lambda epoch: features, options, [1.0])
        train_ours(setup, make_learner(model, LEARNER, steps.total), steps, options)
        ours.append(dev_loss(model, dev_windows))
        put_weights(model, train_peer(setup, padded, seed, num_train_epochs=EPOCHS))
        peer.append(dev_loss(model, dev_windows))
    median = statistics.median(ours)
    place = "below" if median < min(peer) else "above" if median > max(peer) else "within"
    verdict = (
        f"{median:.3f} ours ({min(ours):.3f} to {max(ours):.3f}) lies {place} the peer's {min(peer):.3f} to "
        f"{max(peer):.3f} over {seeds} seeds"
    )
    return {"ours": ours, "peer": peer, "place": place, "verdict": verdict, "windows": len(features), "epochs": EPOCHS}


def put_weights(model: ReaderModel, peer: PreTrainedModel) -> None:
    """Copy the peer's weights into a reader: its encoder, and its output layer as the head."""
    model.encoder.model.load_state_dict(peer.base_model.state_dict())
    with torch.no_grad():
        model.head.task.q.copy_(peer.qa_outputs.weight)
        model.head.task.b.copy_(peer.qa_outputs.bias)


def dev_loss(model: ReaderModel, windows: Features) -> float:
    """Return the mean loss over all windows, in fp32."""
    model.eval().precision = "fp32"
    batches = [collate(windows, chosen) for chosen in longest_first(windows.lengths, 32)]
    totals, loss, total = Totals.of(batches), CrossEntropy(), 0.0
    with torch.inference_mode():
        for batch in batches:
            batch = batch.to(model.device)
            total += float(loss(model.head.task.choices(model(batch), batch), batch, totals)["loss"])
    return total


def questions(data: str | None, size: Size) -> tuple[list[Example], list[Example]]:
    """Return training and dev questions."""
    most = max(size.questions, size.learnt)
    if data is None:
        train, dev = (load_examples([name]).examples for name in ("demo:train", "demo:dev"))
        return of_squad_length(train, most), of_squad_length(dev, size.scored)
    examples = load_examples([data], on_bad_answer="skip", labelled=True).examples
    cut = len(examples) * 9 // 10  # files are ordered by article, so few contexts are on both sides
    return some_of(examples[:cut], most), some_of(examples[cut:], size.scored)


def some_of(examples: Sequence[Example], count: int) -> list[Example]:
    if count > len(examples):
        raise SystemExit(f"expected a file with at least {count} questions on this side, got {len(examples)}.")
    return [examples[place] for place in np.random.default_rng(0).permutation(len(examples))[:count]]


def of_squad_length(examples: Sequence[Example], count: int) -> list[Example]:
    """Return `count` questions, repeating the given ones, each about the text around its answer.

    The bundled contexts are all about equally long. Here each context is cut from their concatenation, with the length
    of a context of SQuAD.
    """
    text = " ".join(dict.fromkeys(example.context.text for example in examples))
    generator = np.random.default_rng(0)
    lengths = np.interp((generator.permutation(count) + 0.5) / max(1, count), SHARES, CHARACTERS)
    resized = []
    for number, (example, length) in enumerate(zip(itertools.cycle(examples), lengths, strict=False)):
        answer = example.answers[0] if example.answers else Answer("", 0)
        at = text.index(example.context.text) + answer.begin_char
        before = int(generator.random() * max(0, length - len(answer.text)))
        begin = text.rfind(" ", 0, max(0, at - before)) + 1
        end = text.find(" ", max(begin + int(length), at + len(answer.text)))
        context = Context(text[begin : end if end >= 0 else len(text)])
        answers = (Answer(answer.text, at - begin),) if example.answers else ()
        resized.append(Example(f"{example.id}-{number}", example.question, context, answers))
    return resized


def rows(features: Features) -> Padded:
    """Return one record per window, padded to the maximum, in the form a Trainer takes.

    They are the same windows as those of `run_qa.py` (`benchmarks/featurise.py` compares them one by one), but cut by
    our code: tokenizers 0.23.2 loses the ends of long contexts.
    """
    padded = []
    for window in range(len(features)):
        ids = features.input_ids[features.rows[window] : features.rows[window + 1]].tolist()
        pads = WINDOWS.max_seq_length - len(ids)
        begin = int(features.context_begin[window])
        padded.append(
            {
                "input_ids": ids + [features.template.pad_id] * pads,
                "attention_mask": [1] * len(ids) + [0] * pads,
                "token_type_ids": [0] * begin + [features.template.context_type] * (len(ids) - begin) + [0] * pads,
                "start_positions": int(features.start[window]),
                "end_positions": int(features.end[window]),
            }
        )
    return padded


if __name__ == "__main__":
    main()
