"""A saved reader: the contents of its folder, and every error of loading in one line."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from doubles import FAMILIES, record_weights, save_tiny_encoder, tiny_batch, tiny_encoder, tiny_run_config
from lamella import files, registry, runs
from lamella.data.dataset import load_examples
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.sources import Source, find_encoder, verified_hash
from lamella.errors import LamellaError, ModelError, OutputError, UnreadableError, UsageError
from lamella.files import file_sha256, write_json
from lamella.heads.head import Stage, StageShape
from lamella.inference.predict import predict
from lamella.models import saved as saved_module
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.names import short_model_name
from lamella.models.saved import read_saved
from lamella.scoring.calibrate import Tuned
from lamella.scoring.domain_scores import domain_scores
from lamella.scoring.tuned_folder import store_tuned

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def model(base: Path) -> ReaderModel:
    torch.manual_seed(3)
    return ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": "frozen"})).eval()


@pytest.fixture
def saved(model: ReaderModel, tmp_path: Path) -> Path:
    model.save(tmp_path / "model")
    return tmp_path / "model"


def refusal(path: Path, kind: type[LamellaError] = ModelError) -> str:
    """Return the error for a model folder, which must be one line."""
    with pytest.raises(kind) as caught:
        ReaderModel.load(path)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)
    record_weights(folder)


def test_a_model_comes_back_as_it_was(model: ReaderModel, saved: Path, base: Path) -> None:
    loaded = ReaderModel.load(saved)
    assert torch.equal(loaded(tiny_batch()), model(tiny_batch()))
    assert not loaded.training
    assert (loaded.base_name, loaded.windows, loaded.decoding) == (str(base), model.windows, model.decoding)
    assert {path.name for path in saved.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert set(load_file(saved / "model.safetensors")) == {"head.task.q", "head.task.b"}  # thin: the encoder stays out


def test_a_run_folder_stands_for_its_model(model: ReaderModel, tmp_path: Path) -> None:
    with runs.new_run(tmp_path / "run", "train") as folder:
        model.save(folder / runs.MODEL)
    assert torch.equal(ReaderModel.load(folder)(tiny_batch()), model(tiny_batch()))


def test_the_statistics_of_a_normalisation_are_saved(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Normalised(Stage):
        def __init__(self, shape: StageShape) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(shape.width)
            self.out_shape = shape

        def forward(self, x: torch.Tensor, hidden: HiddenStates, q: torch.Tensor) -> torch.Tensor:
            return self.norm(x.flatten(0, 3)).view_as(x)  # type: ignore[no-any-return]

    part = registry.Part("mixer", "normalised", Normalised)
    monkeypatch.setitem(registry.FAMILIES["mixer"].parts, "normalised", part)
    config = tiny_run_config(encoder={"tuning": "frozen"}, learner={"mixer": "normalised"})
    model = ReaderModel(load_encoder(str(base)), config)
    untrained = model.eval()(tiny_batch())
    model.train()(tiny_batch())
    model.save(tmp_path / "model")
    trained = model.eval()(tiny_batch())
    assert not torch.equal(trained, untrained)
    assert torch.equal(ReaderModel.load(tmp_path / "model")(tiny_batch()), trained)


def test_equal_models_give_equal_files(base: Path, tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        torch.manual_seed(3)
        config = tiny_run_config(encoder={"tuning": "full"})
        ReaderModel(load_encoder(str(base)), config).save(tmp_path / name / "reader")  # the card shows the name
    for file in (tmp_path / "first" / "reader").iterdir():
        files = {(tmp_path / name / "reader" / file.name).read_bytes() for name in ("first", "second", "third")}
        assert len(files) == 1, file.name


def test_saving_replaces_an_older_model_as_a_whole(model: ReaderModel, saved: Path, tmp_path: Path) -> None:
    (saved / "left_over.txt").touch()
    with torch.no_grad():
        model.head.task.b.add_(1)
    model.save(saved)
    assert torch.equal(ReaderModel.load(saved).head.task.b, torch.ones(2))
    assert not (saved / "left_over.txt").exists()
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (saved_module, "write_bytes"),
        (saved_module, "write_json"),
        (saved_module, "write_text"),
        (files, "replace_folder"),
    ],
)
def test_a_save_that_fails_leaves_the_older_model_and_nothing_else(
    model: ReaderModel, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    before = model(tiny_batch())
    with torch.no_grad():
        model.head.task.b.add_(1)
    monkeypatch.setattr(module, step, fail)
    with pytest.raises(KeyboardInterrupt):
        model.save(saved)
    assert os.listdir(tmp_path) == ["model"]
    assert torch.equal(ReaderModel.load(saved)(tiny_batch()), before)


def test_a_folder_with_other_files_is_never_replaced(model: ReaderModel, base: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    shutil.copytree(base, tmp_path / "encoder")
    for folder in (tmp_path, tmp_path / "encoder", tmp_path / "thesis.tex"):
        with pytest.raises(
            UsageError, match="expected a model folder or an empty one, found other files; choose another"
        ):
            model.save(folder)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    model.save(tmp_path / "empty")
    assert torch.equal(ReaderModel.load(tmp_path / "empty").head.task.q, model.head.task.q)


def test_the_base_of_a_model_is_never_replaced(chain: Path) -> None:
    """Both would be lost: the base, and the model that needs it."""
    model = ReaderModel.load(chain / "third")
    for base in ("first", "second"):
        with pytest.raises(UsageError, match="holds the base of this model; choose another folder to save to"):
            model.save_pretrained(chain / "x" / ".." / base)
    model.save_pretrained(chain / "third")
    assert torch.equal(ReaderModel.load(chain / "third")(tiny_batch()), model(tiny_batch()))


def test_a_model_folder_has_the_permissions_of_the_umask(model: ReaderModel, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        model.save(tmp_path / "model")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "model" / "config.json").stat().st_mode) == 0o640


def test_every_option_is_saved_even_if_it_has_its_default(base: Path, tmp_path: Path) -> None:
    """A new default in a later version must not change a model of this version.

    An option that was added later is left out instead, and its default never changes.
    """
    config = tiny_run_config(encoder={"tuning": "lora"}, learner={"mixer": "scalar_mix", "beside": "compress"})
    ReaderModel(load_encoder(str(base)), config).save(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    for family, spec in [
        ("tuning", saved["tuning"]),
        *(("mixer", saved["head"][key][0]) for key in ("mixer", "beside")),
    ]:
        part = registry.part(family, spec["name"])
        assert part.options
        assert set(spec) == {"name", *(option.name for option in part.options)} - part.later_defaults.keys()
    again = ReaderModel.load(tmp_path / "model")
    again.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == saved


# --- a chain of models


@pytest.fixture
def chain(base: Path, tmp_path: Path) -> Path:
    """Three models, each built on the previous: first, second, third."""
    below = base
    for name, tuning in (("first", "full"), ("second", "adapter"), ("third", "frozen")):
        model = ReaderModel(load_encoder(str(below)), tiny_run_config(encoder={"tuning": tuning}))
        below = tmp_path / name
        model.save(below)
    return tmp_path


def test_a_chain_is_resolved_down_to_its_encoder(chain: Path, base: Path) -> None:
    model = ReaderModel.load(chain / "third")
    assert model.folders == (chain / "third", chain / "second", chain / "first", base)
    assert model.base_name == str(chain / "second")


def test_a_missing_model_of_a_chain_is_named(chain: Path) -> None:
    shutil.rmtree(chain / "first")
    with pytest.raises(ModelError) as caught:
        ReaderModel.load(chain / "third")
    message = str(caught.value)
    assert message.startswith(
        f"{chain / 'second'}: the base encoder cannot be loaded: encoder {str(chain / 'first')!r}: not a folder"
    )
    assert "\n" not in message


@pytest.mark.parametrize("last", ["first", "second", "third"])
def test_a_circular_base_is_refused(chain: Path, last: str) -> None:
    edit_config(chain / "first", lambda config: config["base"].update(name=str(chain / "x" / ".." / last)))
    (chain / "x").mkdir()
    with pytest.raises(ModelError) as caught:
        ReaderModel.load(chain / "third")
    assert str(caught.value).endswith(
        f"{last}': circular base-model reference; no encoder is at the bottom of this chain."
    )
    assert str(caught.value).startswith(f"{chain / 'first'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda config: config["base"].update(sha256="0" * 64), True),
        (lambda config: config["tuning"].update(size=32), True),
        (lambda config: config.update(tuned_before=[{"name": "bitfit"}]), True),
        (lambda config: config["base"].update(name=config["base"]["name"] + "/."), False),
        (lambda config: config["decoding"].update(null_score_diff_threshold=1.5), False),
    ],
    ids=["its base", "its tuning", "earlier tunings", "a path", "a threshold"],
)
def test_the_identity_of_a_base_covers_everything_that_determines_its_encoder(
    chain: Path, change: Callable[[dict[str, Any]], Any], noticed: bool
) -> None:
    """The tensors alone are not enough: on another base they give another encoder."""
    before = verified_hash(find_encoder(str(chain / "second")))
    edit_config(chain / "second", change)
    assert (verified_hash(find_encoder(str(chain / "second"))) != before) is noticed
    if not noticed:
        ReaderModel.load(chain / "third")


def test_another_model_instead_of_the_base_is_refused(chain: Path, base: Path) -> None:
    shutil.rmtree(chain / "second")
    ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": "adapter"})).save(chain / "second")
    assert f"expected base encoder {str(chain / 'second')!r} with sha256" in refusal(chain / "third")


def test_lora_of_a_base_is_merged_and_its_adapters_stay_separate(base: Path, tmp_path: Path) -> None:
    for name in ("lora", "adapter"):
        ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": name})).save(tmp_path / name)
    merged, adapted = (set(load_encoder(str(tmp_path / name)).encoder.state_dict()) for name in ("lora", "adapter"))
    plain = set(load_encoder(str(base)).encoder.state_dict())
    assert merged == plain
    assert {name for name in adapted - plain if ".adapter." in name} == adapted - plain != set()


# --- the methods of transformers, and the hub


def into_cache(cache: Path, repository: str, folder: Path) -> Path:
    """Copy a folder to the cache, in the layout of the hub's client."""
    repository_folder = cache / f"models--{repository.replace('/', '--')}"
    shutil.copytree(folder, repository_folder / "snapshots" / ("0" * 40))
    (repository_folder / "refs").mkdir()
    (repository_folder / "refs" / "main").write_text("0" * 40)
    return repository_folder / "snapshots" / ("0" * 40)


@pytest.fixture
def hub(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with an encoder, a model on it, and a model on that model."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    into_cache(cache, "org/tiny", base)
    for name, below, tuning in (("org/first", "org/tiny", "lora"), ("org/second", "org/first", "adapter")):
        model = ReaderModel(load_encoder(below), tiny_run_config(encoder={"tuning": tuning}))
        model.save_pretrained(str(tmp_path / "made"))
        into_cache(cache, name, tmp_path / "made")
    shutil.rmtree(tmp_path / "made")
    return cache


def test_save_pretrained_and_from_pretrained(model: ReaderModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    for name in (tmp_path / "model", str(tmp_path / "model")):
        loaded = ReaderModel.from_pretrained(name)
        assert torch.equal(loaded(tiny_batch()), model(tiny_batch()))
        assert (loaded.device.type, loaded.precision, loaded.training) == ("cpu", "fp32", False)


def test_save_pretrained_never_removes_folders_beside_the_model(
    model: ReaderModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model folder may be a clone of a repository: replacing it would remove its history."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model.save_pretrained("~/model")
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / ".git").mkdir()
    (tmp_path / "model" / ".git" / "HEAD").write_text("ref: refs/heads/main")
    with pytest.raises(OutputError, match=r"holds the folder \.git, which would be removed"):
        model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / ".git" / "HEAD").is_file()


def test_a_model_of_the_hub_and_the_chain_below_it(hub: Path) -> None:
    model = ReaderModel.from_pretrained("org/second")
    assert model.base_name == "org/first"
    names = [f"models--org--{name}" for name in ("second", "first", "tiny")]
    assert [folder.parent.parent.name for folder in model.folders] == names
    assert isinstance(load_model("org/first", device="cpu", backend="torch"), ReaderModel)
    with pytest.raises(UsageError, match="'org/absent'"):
        ReaderModel.from_pretrained("org/absent")


def test_the_model_folder_is_pushed(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: dict[str, Any] = {}

    def create(api: Any, repo_id: str, **options: Any) -> Any:
        pushed.update(options)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload(api: Any, *, repo_id: str, folder_path: Path, **options: Any) -> None:
        pushed["repository"] = repo_id
        shutil.copytree(folder_path, tmp_path / "uploaded")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    model = ReaderModel.from_pretrained("org/second")
    assert model.push_to_hub("me/reader", private=True) == "https://huggingface.co/me/reader"
    assert pushed == {"private": True, "exist_ok": True, "repository": "me/reader"}
    assert {path.name for path in (tmp_path / "uploaded").iterdir()} >= {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert torch.equal(ReaderModel.load(tmp_path / "uploaded")(tiny_batch()), model(tiny_batch()))
    assert 'base_model: "org/first"' in (tmp_path / "uploaded" / "README.md").read_text()


def test_a_model_on_a_folder_is_not_pushed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *arguments, **options: pytest.fail("created"))
    with pytest.raises(
        UsageError, match=r"a folder that exists only on this machine\. .*lamella export MODEL --flatten DIR$"
    ):
        ReaderModel.load(saved).push_to_hub("me/reader")


def test_a_push_that_fails_is_one_line(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    with pytest.raises(LamellaError) as caught:
        ReaderModel.from_pretrained("org/first").push_to_hub("me/reader")
    assert str(caught.value) == "push_to_hub: 'me/reader' cannot be written: no route to host."


# --- errors of loading


def test_a_missing_tensor(saved: Path) -> None:
    edit_tensors(saved, head__task__b=None)
    assert refusal(saved).endswith("model.safetensors: does not fit its configuration: head.task.b is missing.")


def test_an_extra_tensor(saved: Path) -> None:
    edit_tensors(saved, head__task__extra=torch.zeros(3))
    assert refusal(saved).endswith("head.task.extra is unexpected.")


def test_a_tensor_of_another_shape(saved: Path) -> None:
    edit_tensors(saved, head__task__q=torch.zeros(2, 31))
    assert refusal(saved).endswith("head.task.q has shape [2, 31] instead of [2, 32].")


def test_an_encoder_s_tensor_where_the_encoder_was_frozen(saved: Path) -> None:
    edit_tensors(saved, encoder__model__embeddings__LayerNorm__bias=torch.zeros(32))
    assert refusal(saved).endswith("encoder.model.embeddings.LayerNorm.bias is unexpected.")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights_of_a_folder_without_their_hash(saved: Path, keep: int) -> None:
    edit_config(saved, lambda config: config.pop("weights_sha256"))
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors: expected a safetensors file, found a damaged one (" in refusal(saved)


@pytest.mark.parametrize("damage", ["a flipped bit", "a missing byte", "another model"])
def test_weights_that_are_not_those_saved(saved: Path, base: Path, tmp_path: Path, damage: str) -> None:
    file, expected = saved / "model.safetensors", file_sha256(saved / "model.safetensors")
    content = file.read_bytes()
    if damage == "another model":
        ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": "frozen"})).save(tmp_path / "other")
        file.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    else:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if "bit" in damage else content[:-1])
    assert refusal(saved) == (
        f"{file}: expected sha256 {expected[:12]}…, as recorded in config.json, found {file_sha256(file)[:12]}…; the "
        "file is damaged or was replaced: copy or download the model again."
    )
    file.write_bytes(content)
    second = ReaderModel(load_encoder(str(saved)), tiny_run_config(encoder={"tuning": "frozen"}))
    second.save(tmp_path / "second")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelError, match=rf"^{file}: expected sha256"):
        ReaderModel.load(tmp_path / "second")


def test_a_folder_without_the_hash_of_its_weights_is_read(saved: Path) -> None:
    expected, sha256 = ReaderModel.load(saved)(tiny_batch()), verified_hash(Source("m", saved, "folder"))
    edit_config(saved, lambda config: config.pop("weights_sha256"))
    assert torch.equal(ReaderModel.load(saved)(tiny_batch()), expected)
    assert verified_hash(Source("m", saved, "folder")) == sha256  # models on top know it by this hash


def test_a_new_threshold_keeps_the_hash_of_the_weights(saved: Path) -> None:
    decoding = ReaderModel.load(saved).decoding.model_copy(update={"null_score_diff_threshold": 1.5})
    store_tuned(saved, Tuned(decoding, {}), saved)
    assert read_saved(saved).weights_sha256 == file_sha256(saved / "model.safetensors")
    assert ReaderModel.load(saved).decoding.null_score_diff_threshold == 1.5


def test_scores_on_other_texts_are_stored_and_shown_on_the_card(saved: Path) -> None:
    loaded, threshold = ReaderModel.load(saved), ReaderModel.load(saved).decoding.null_score_diff_threshold
    examples = load_examples("demo:dev").examples[:6]
    scores = domain_scores("letters.json", examples, predict(loaded, examples), loaded.decoding)
    loaded.save_facts(saved, domains=[scores])
    assert ReaderModel.load(saved).facts.domains == [scores]
    assert ReaderModel.load(saved).decoding.null_score_diff_threshold == threshold
    assert read_saved(saved).weights_sha256 == file_sha256(saved / "model.safetensors")
    assert "## Other texts" in (saved / "README.md").read_text()
    assert f"| `letters.json` | 6 ({scores.unanswerable}) | {scores.f1:.1f} [" in (saved / "README.md").read_text()


def test_a_folder_of_models_beside_the_runs_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("models/mpnet", "runs/first/models/0.3"):
        Path(name).mkdir(parents=True)
    assert short_model_name("models/mpnet") == "mpnet"
    assert short_model_name("runs/first/models/0.3") == "first@0.3"


def test_weights_that_are_gone(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    assert refusal(saved).endswith("model.safetensors: no such file; the model folder is incomplete.")


def test_another_base_encoder(base: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(base, tmp_path / "mine"))
    ReaderModel(load_encoder(str(mine)), tiny_run_config()).save(tmp_path / "model")
    save_tiny_encoder(mine, seed=1)
    assert "with sha256" in refusal(tmp_path / "model")
    shutil.rmtree(mine)
    assert f"the base encoder cannot be loaded: encoder {str(mine)!r}: not a folder" in refusal(tmp_path / "model")


def test_a_tokenizer_that_is_gone(saved: Path) -> None:
    (saved / "tokenizer.json").unlink()
    with pytest.raises(LamellaError, match=r"expected a tokenizer \(tokenizer\.json or vocab\.txt\), found none\.$"):
        ReaderModel.load(saved)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_of_the_format(saved: Path, version: Any) -> None:
    edit_config(saved, lambda config: config.update(lamella=version))
    assert refusal(saved).endswith(
        f"config.json: expected model format 1, got {version!r}; use another version of lamella."
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda config: config.pop("base"), "expected base (with name and sha256), tuning, head, windows and decoding"),
        (lambda config: config["base"].pop("sha256"), "expected base (with name and sha256), tuning, head, windows"),
        (lambda config: config.update(base="x"), "expected base (with name and sha256), tuning, head, windows"),
        (lambda config: config.update(tuning={"name": "tuned_later"}), "encoder.tuning: tuning 'tuned_later' does not"),
        (lambda config: config.update(tuning={}), "encoder.tuning: expected the name of a part"),
        (lambda config: config["head"].update(mixer=[{"name": "lats"}]), "mixer 'lats' does not exist. Did you mean"),
        (lambda config: config["head"].update(mixer=[{"name": "last", "k": 3}]), "learner.mixer[0].k: no such option"),
        (
            lambda config: config["windows"].update(max_seq_length="long"),
            "windows.max_seq_length: expected a whole num",
        ),
        (lambda config: config["windows"].update(later=3), "windows.later: no such option."),
    ],
)
def test_a_damaged_configuration(saved: Path, change: Callable[[dict[str, Any]], Any], expected: str) -> None:
    edit_config(saved, change)
    message = refusal(saved)
    assert message.startswith(f"{saved / 'config.json'}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda config: config.update(tuning={"name": "top_k", "k": 9}), "expected at most 3, the number of layers;"),
        (lambda config: config["head"].update(layers=[7]), "expected different layers from 0 to 3, got [7]."),
        (lambda config: config["windows"].update(max_seq_length=500), "windows.max_seq_length: expected at most 130"),
    ],
)
def test_a_configuration_that_does_not_fit_its_base(
    saved: Path, change: Callable[[dict[str, Any]], Any], expected: str, tmp_path: Path
) -> None:
    edit_config(saved, change)
    message = refusal(saved)
    assert message.startswith(f"{saved / 'config.json'}: does not fit its base encoder: ")
    assert expected in message


def test_a_tuning_that_does_not_fit_its_base_further_down_the_chain(chain: Path) -> None:
    edit_config(chain / "first", lambda config: config.update(tuning={"name": "top_k", "k": 9}))
    with pytest.raises(ModelError) as caught:
        ReaderModel.load(chain / "third")
    assert str(caught.value).startswith(
        f"{chain / 'first' / 'config.json'}: does not fit its base encoder: expected at most 3"
    )


def test_a_configuration_that_is_not_json(saved: Path, tmp_path: Path) -> None:
    (saved / "config.json").write_text('{"lamella": 1,')
    assert refusal(saved, UnreadableError).startswith(f"{saved / 'config.json'}:1:15: broken JSON")
    write_json(tmp_path / "run.json", {"state": "finished"})
    assert refusal(tmp_path, UnreadableError).startswith(f"{saved / 'config.json'}:1:15: broken JSON")


def test_a_run_without_a_model(tmp_path: Path) -> None:
    with runs.new_run(tmp_path / "run", "train") as folder:
        write_json(folder / runs.CONFIG, {"encoder": {}})
        assert refusal(folder, UsageError).endswith(
            "found a training run that is unfinished, without a model so far; continue it with --resume."
        )
    assert refusal(folder, UsageError) == (
        f"{folder}: expected a model folder, or a run folder with a model; found a training run whose model is gone; "
        "restore it, or train again."
    )
    with runs.new_run(tmp_path / "answers", "predict", model={"name": "runs/first"}) as folder:
        pass
    for load in (ReaderModel.load, ReaderModel.from_pretrained):
        with pytest.raises(UsageError) as caught:
            load(folder)
        assert str(caught.value) == (
            f"{folder}: expected a model folder, or a run folder with a model; found the answers of `lamella predict`; "
            "give the model that made them, runs/first."
        )
    with runs.new_run(tmp_path / "ensemble", "ensemble") as folder:
        pass
    assert refusal(folder, UsageError).endswith(
        "found the answers of `lamella ensemble`; give the model that made them."
    )


def test_a_path_with_nothing_or_something_else(base: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent", UsageError) == (
        f"{tmp_path / 'absent'}: expected a model folder, or a run folder with a model; found nothing there."
    )
    assert refusal(tmp_path, UsageError).endswith("found neither.")
    assert refusal(base, UsageError).endswith("found neither.")
    assert refusal(base / "config.json", UsageError).endswith("found neither.")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_longer_than_the_encoder_s_positions(family: str) -> None:
    longest = tiny_encoder(family).encoder.longest_window
    windows = {"max_query_length": 24, "doc_stride": 16}
    ReaderModel(tiny_encoder(family), tiny_run_config(windows={**windows, "max_seq_length": longest}))
    with pytest.raises(UsageError) as caught:
        ReaderModel(tiny_encoder(family), tiny_run_config(windows={**windows, "max_seq_length": longest + 1}))
    assert str(caught.value) == (
        f"windows.max_seq_length: expected at most {longest}, the number of positions of tiny-{family}; "
        f"got {longest + 1}."
    )


# --- computing


def test_only_the_encoder_computes_in_half_precision(model: ReaderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    half: dict[str, bool] = {}
    for part in (model.encoder, model.head):

        def spy(*inputs: Any, part: Any = part, forward: Any = part.forward) -> Any:
            half[type(part).__name__] = torch.is_autocast_enabled("cpu")
            return forward(*inputs)

        monkeypatch.setattr(part, "forward", spy)
    exact = model(tiny_batch())
    assert half == {"Encoder": False, "Head": False}
    model.precision = "bf16"
    rough = model(tiny_batch())
    assert half == {"Encoder": True, "Head": False}
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, atol=0.05, rtol=0)
    assert not torch.equal(rough, exact)
