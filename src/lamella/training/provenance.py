"""What a finished run was made from, against what there is now: a file may change, and its name stay."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lamella import runs
from lamella.config import RunConfig
from lamella.data.demo import data_path
from lamella.encoder.sources import MODEL_CONFIG, encoder_here, verified_hash
from lamella.errors import LamellaError, ModelError, RunError
from lamella.files import file_sha256, read_json
from lamella.models.names import saved_model
from lamella.models.saved import read_saved, weights_sha256


def refuse_changed(configs: Mapping[Path, RunConfig], *, advice: str) -> None:
    """Runs by their folders: one that is over, and so is kept, must be the one that would be trained now."""
    ground = Ground()
    for folder, config in configs.items():
        if runs.is_over(folder):
            ground.refuse_other(folder, config, advice)


class Ground:
    """The data, encoders, starts and teachers that there are now, each hashed once, however many runs stand on it."""

    def __init__(self) -> None:
        self.hashes: dict[str, str | None] = {}

    def refuse_other(self, folder: Path, config: RunConfig, advice: str) -> None:
        """An error for what has changed. What is not there any more tells nothing."""
        for what, then, now in self._pairs(folder, config):
            if now is not None and then != now:
                raise RunError(
                    f"{folder}: this run was made with {what} of sha256 {then[:12]}…; the one found here has "
                    f"{now[:12]}…. {advice}"
                )

    def _pairs(self, folder: Path, config: RunConfig) -> Iterator[tuple[str, str, str | None]]:
        """What it is called, its hash when the run was made, and its hash now."""
        for file in read_json(folder / runs.RUN).get("files") or []:
            yield file["name"], file["sha256"], self._of_data(file["name"])
        model = folder / runs.MODEL
        if not (model / MODEL_CONFIG).is_file():  # a run that diverged has none
            return
        saved = read_json(model / MODEL_CONFIG)
        base, start = saved["base"], saved["facts"].get("start")
        yield f"the encoder {base['name']!r}", base["sha256"], self._of_encoder(base["name"], base["sha256"], model)
        if start is not None and start.get("sha256") and config.learner.start is not None:
            yield f"the start {config.learner.start!r}", start["sha256"], self._of_model(config.learner.start)
        distil, teachers = config.learner.distil or {}, saved["facts"].get("teachers") or []
        for kind, hash_now in (("runs", self._of_logits), ("models", self._of_model)):
            for name, teacher in zip(distil.get(kind, []), teachers, strict=False):  # a model of before tells of none
                if teacher.get("sha256"):
                    yield f"the teacher {name!r}", teacher["sha256"], hash_now(name)

    def _of_data(self, name: str) -> str | None:
        path = data_path(name)
        return self._once(f"data {name}", lambda: file_sha256(path) if path.is_file() else None)

    def _of_encoder(self, name: str, then: str, model: Path) -> str | None:
        """The one of then, too, where the same encoder lies in another file."""

        def hash_it() -> str | None:
            found = encoder_here(name)
            now = None if found is None else verified_hash(found)
            return then if now not in (None, then) and _lies_elsewhere(model) else now

        return self._once(f"encoder {name}, once {then}", hash_it)

    def _of_model(self, name: str) -> str | None:
        model = saved_model(name)
        return self._once(f"model {name}", lambda: weights_sha256(model) if model else None)

    def _of_logits(self, name: str) -> str | None:
        """That of the model which gave them."""
        index = Path(os.path.expanduser(name)) / runs.LOGITS_INDEX
        return self._once(f"logits {name}", lambda: read_json(index).get("model", {}).get("sha256"))

    def _once(self, key: str, hash_it: Callable[[], str | None]) -> str | None:
        if key not in self.hashes:
            try:
                self.hashes[key] = hash_it()
            except LamellaError:  # an encoder of which only a part is left, say
                self.hashes[key] = None
        return self.hashes[key]


def _lies_elsewhere(model: Path) -> bool:
    """Whether the encoder of a saved model is the same in another file, which its tensors tell."""
    from lamella.models.base_encoder import load_base  # torch, for what is hardly ever asked

    try:
        load_base(model, read_saved(model))
    except ModelError:
        return False
    return True
