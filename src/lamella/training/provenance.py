"""Compare what a finished run was made from with what there is now: a file may change while its name stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lamella import runs
from lamella.config import RunConfig, TeacherFolder
from lamella.data.demo import data_path
from lamella.encoder.sources import MODEL_CONFIG, find_local_encoder, verified_hash
from lamella.errors import LamellaError, ModelError, RunError, collect_warnings
from lamella.files import file_sha256, read_json
from lamella.models.names import saved_model
from lamella.models.saved import read_saved, weights_sha256


def check_unchanged(configs: Mapping[Path, RunConfig], *, advice: str) -> None:
    """Check that finished runs, by their folders, were made from the same files that would be used now."""
    provenance = Provenance()
    for folder, config in configs.items():
        if runs.is_over(folder):
            provenance.check(folder, config, advice)


class Provenance:
    """The data, encoders, warm starts and teachers as they are now, each hashed once for all runs."""

    def __init__(self) -> None:
        self.hashes: dict[str, str | None] = {}

    def check(self, folder: Path, config: RunConfig, advice: str) -> None:
        """Raise for the first source that has changed; one that is gone is not checked."""
        for source, recorded, current in self._sources(folder, config):
            if current is not None and recorded != current:
                raise RunError(
                    f"{folder}: expected {source} with sha256 {recorded[:12]}…, which this run was made with, got "
                    f"{current[:12]}…. {advice}"
                )

    def _sources(self, folder: Path, config: RunConfig) -> Iterator[tuple[str, str, str | None]]:
        """Yield the description of each source, its hash when the run was made, and its hash now."""
        for file in read_json(folder / runs.RUN).get("files") or []:
            yield file["name"], file["sha256"], self._hash_data(file["name"])
        model = folder / runs.MODEL
        if not (model / MODEL_CONFIG).is_file():  # a run that diverged has none
            return
        saved = read_json(model / MODEL_CONFIG)
        base, start = saved["base"], saved["facts"].get("start")
        yield f"the encoder {base['name']!r}", base["sha256"], self._hash_encoder(base["name"], base["sha256"], model)
        if start is not None and start.get("sha256") and config.learner.start is not None:
            yield f"the start {config.learner.start!r}", start["sha256"], self._hash_model(config.learner.start)
        recorded = saved["facts"].get("teachers") or []  # older models record none
        for teacher, facts in zip(config.learner.teacher_folders, recorded, strict=False):
            if facts.get("sha256"):
                yield f"the teacher {teacher.name!r}", facts["sha256"], self._hash_teacher(teacher)

    def _hash_data(self, name: str) -> str | None:
        path = data_path(name)
        return self._once(f"data {name}", lambda: file_sha256(path) if path.is_file() else None)

    def _hash_encoder(self, name: str, recorded: str, model: Path) -> str | None:
        """Return the recorded hash also where another file holds the same encoder."""

        def compute() -> str | None:
            source = find_local_encoder(name)
            current = None if source is None else verified_hash(source)
            return recorded if current not in (None, recorded) and _has_equal_tensors(model) else current

        return self._once(f"encoder {name}, once {recorded}", compute)

    def _hash_model(self, name: str) -> str | None:
        model = saved_model(name)
        return self._once(f"model {name}", lambda: weights_sha256(model) if model else None)

    def _hash_teacher(self, teacher: TeacherFolder) -> str | None:
        """Hash a teacher's model; kept logits record the hash of the model that computed them."""
        if teacher.kind == "model":
            return self._hash_model(teacher.name)
        index = Path(os.path.expanduser(teacher.name)) / runs.LOGITS_INDEX
        return self._once(f"logits {teacher.name}", lambda: read_json(index).get("model", {}).get("sha256"))

    def _once(self, key: str, compute: Callable[[], str | None]) -> str | None:
        if key not in self.hashes:
            try:
                self.hashes[key] = compute()
            except LamellaError:  # for example an encoder that is only partly there
                self.hashes[key] = None
        return self.hashes[key]


def _has_equal_tensors(model: Path) -> bool:
    """Whether the encoder of a saved model is the same in another file, by its tensors; an original is not."""
    from lamella.models.base_encoder import load_base  # imports torch, and is hardly ever needed

    try:
        with collect_warnings():
            return load_base(model, read_saved(model)).original_sha256 is None
    except ModelError:
        return False
