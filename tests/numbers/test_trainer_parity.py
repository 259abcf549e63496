"""Training takes the same steps as `transformers.Trainer`: on the same batches, the losses are equal at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertForQuestionAnswering, PrinterCallback, Trainer, TrainingArguments, default_data_collator

from doubles import tiny_config, tiny_model
from lamella.config import LearnerOptions
from lamella.data.dataset import load_examples
from lamella.data.windows.batches import Batch, Totals
from lamella.data.windows.features import Features, featurise
from lamella.models.model import ReaderModel
from lamella.training.fitting.learner import Learner, make_learner

BATCH, STEPS = 4, 12
OPTIONS = LearnerOptions(learning_rate=5e-3, weight_decay=0.1, schedule={"name": "linear", "warmup": 0.25})

pytestmark = pytest.mark.usefixtures("one_thread")


class RecordingTrainer(Trainer):
    """A Trainer that records its initial weights, every batch and every loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.batches: list[dict[str, Tensor]] = []
        self.losses: list[float] = []

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        self.batches.append({name: tensor.clone() for name, tensor in inputs.items()})
        loss = super().compute_loss(model, inputs, *more, **options)
        self.losses.append(loss.item())
        return loss


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> RecordingTrainer:
    """A Trainer that has trained a tiny BERT. AdamW and the clipping of gradients are its defaults."""
    torch.manual_seed(0)
    model = BertForQuestionAnswering(tiny_config("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    trainer = RecordingTrainer(
        model=model,
        args=arguments(tmp_path_factory.mktemp("trainer")),
        train_dataset=full_windows(),
        data_collator=default_data_collator,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=OPTIONS.learning_rate,
        weight_decay=OPTIONS.weight_decay,
        warmup_steps=STEPS // 4,
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
    )


def full_windows() -> list[dict[str, Any]]:
    """Windows of the bundled set without a pad, half of them with an answer."""
    features = cut()
    full = np.flatnonzero(features.lengths == features.max_seq_length)
    answered = full[features.start[full] > 0][: STEPS * 2]
    rows = [*answered, *full[features.start[full] == 0][: STEPS * 2]]
    assert len(rows) == STEPS * BATCH
    return [
        {
            "input_ids": features.input_ids[features.rows[row] : features.rows[row + 1]].tolist(),
            "attention_mask": [1] * features.max_seq_length,
            "token_type_ids": (np.arange(features.max_seq_length) >= features.context_begin[row]).astype(int).tolist(),
            "start_positions": int(features.start[row]),
            "end_positions": int(features.end[row]),
        }
        for row in rows
    ]


def cut() -> Features:
    model = tiny_model()
    return featurise(load_examples(["demo:train"]).examples, model.tokenizer, model.windows)


def as_batch(inputs: dict[str, Tensor]) -> Batch:
    """Return the trainer's tensors as a batch; the token types mark the context."""
    context = inputs["token_type_ids"].bool()
    context[:, -1] = False  # [SEP]
    return Batch(
        input_ids=inputs["input_ids"],
        mask=inputs["attention_mask"].bool(),
        token_types=inputs["token_type_ids"],
        is_context=context,
        start=inputs["start_positions"],
        end=inputs["end_positions"],
        windows=np.arange(len(context)),
    )


def like(start: dict[str, Tensor]) -> ReaderModel:
    """A reader with the weights of BERT's own question answering model."""
    model = tiny_model(dropout=False)
    model.encoder.model.load_state_dict(
        {name.removeprefix("bert."): tensor for name, tensor in start.items() if name.startswith("bert.")}
    )
    with torch.no_grad():
        model.head.task.q.copy_(start["qa_outputs.weight"])
        model.head.task.b.copy_(start["qa_outputs.bias"])
    return model.train()


def follow(trainer: RecordingTrainer, options: LearnerOptions) -> tuple[Learner, list[float]]:
    """Train a learner on the batches that the trainer saw."""
    learner = make_learner(like(trainer.start), options, STEPS)
    for step, inputs in enumerate(trainer.batches):
        batch = as_batch(inputs)
        learner.add_gradients(batch, None, Totals.of([batch]))
        learner.step(epoch=(step + 1) / STEPS)
    return learner, [record["loss"] for record in learner.take_records(lambda values: values)[0]]


def test_the_losses_equal_the_trainers_on_its_batches(trainer: RecordingTrainer) -> None:
    """Dropout is off. No window has pads: BERT's own loss includes the pads in the softmax, ours does not."""
    assert all(batch["attention_mask"].all() for batch in trainer.batches)
    assert len(trainer.batches) == STEPS
    learner, losses = follow(trainer, OPTIONS)
    assert abs(losses[0] - losses[-1]) > 0.5  # training changed something
    np.testing.assert_allclose(losses, trainer.losses, atol=1e-4, rtol=0)

    reference = trainer.model.state_dict()
    learned = {f"bert.{name}": tensor for name, tensor in learner.model.encoder.model.state_dict().items()}
    learned["qa_outputs.weight"] = learner.model.head.task.q.detach()
    assert {*reference} - {*learned} == {"qa_outputs.bias"}
    for name, tensor in learned.items():
        if "key.bias" not in name:  # its gradient is rounding noise, which AdamW amplifies
            torch.testing.assert_close(tensor, reference[name], atol=1e-3, rtol=0, msg=name)


@pytest.mark.parametrize(
    "changed",
    [
        {"learning_rate": 4.5e-3},
        {"weight_decay": 0.0},
        {"max_grad_norm": 10.0},
        {"schedule": {"name": "linear", "warmup": 0.0}},
        {"schedule": {"name": "constant", "warmup": 0.25}},
    ],
    ids=str,
)
def test_every_option_changes_the_losses(trainer: RecordingTrainer, changed: dict[str, Any]) -> None:
    """Each of these options changes the losses by more than the tolerance above."""
    _, losses = follow(trainer, OPTIONS.model_copy(update=changed))
    assert np.abs(np.array(losses) - trainer.losses).max() > 3e-4
