"""Run files: all problems reported at once, `--set` overrides, and reading a run's own config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.config import RunConfig
from lamella.errors import ConfigError, UnreadableError
from lamella.option_errors import TRAINER_OPTIONS
from lamella.run_file import load_config
from lamella.validation import check_config


def problems(table: dict[str, Any]) -> set[str]:
    """The problems of a configuration."""
    with pytest.raises(ConfigError) as caught:
        check_config(table, where="run.toml")
    assert str(caught.value).splitlines()[0] == f"run.toml: {len(caught.value.problems)} problem" + (
        "s" if len(caught.value.problems) > 1 else ""
    )
    return set(caught.value.problems)


def settings(*overrides: str) -> dict[str, Any]:
    """The options that differ from their defaults, for a configuration made of `--set` alone."""
    return load_config(None, overrides).model_dump(exclude_defaults=True)


def set_problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    (problem,) = caught.value.problems
    return problem


def test_no_file_is_the_defaults() -> None:
    assert load_config(None) == RunConfig() == check_config({}, where="")


def test_every_problem_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(
        """
        epochs = 3                       # belongs to a section
        [windoes]                        # unknown section
        doc_stride = 1
        [windows]
        max_seq_length = 60              # a rule across options
        [training]
        batch_sise = 16                  # unknown key
        epochs = "two"                   # wrong type
        [learner]
        learning_rate = -1.0             # out of bounds
        seed = true                      # wrong type that Python would take for a number
        task = "sapn"                    # unknown part
        schedule = { name = "linear", warm_up = 0.1, warmup = 2 }
        mixer = ["last", "lats"]
        [encoder]
        tuning = { k = 3 }               # a part without its name
        [decoding]
        n_best_size = 0.5
        """,
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert set(caught.value.problems) == {
        "epochs: no such option here. Did you mean training.epochs?",
        "windoes: no such section. Did you mean 'windows'?",
        "windows.max_seq_length: expected room for a question of max_query_length 64 tokens, 4 special tokens and some "
        "context, got 60.",
        "training.batch_sise: no such option. Did you mean 'batch_size' or 'eval_batch_size'?",
        "training.epochs: expected a number, got 'two'.",
        "learner.learning_rate: expected more than 0.0, got -1.0.",
        "learner.seed: expected a whole number, got True.",
        "learner.task: task 'sapn' does not exist. Did you mean 'span'?",
        "learner.schedule.warm_up: no such option. Did you mean 'warmup'?",
        "learner.schedule.warmup: expected at most 1.0, got 2.",
        "learner.mixer[1]: mixer 'lats' does not exist. Did you mean 'last'?",
        "encoder.tuning: expected the name of a part, or a table with \"name\" and its options, got {'k': 3}.",
        "decoding.n_best_size: expected a whole number, got 0.5.",
    }
    assert str(caught.value).splitlines()[0] == f"{file}: 13 problems"
    assert len(str(caught.value).splitlines()) == 14


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"data": {"train": 3}}, "data.train: expected a text in quotes, got 3."),
        ({"data": {"train": ["a", 3]}}, "data.train[1]: expected a text in quotes, got 3."),
        ({"data": {"train": [{"weight": 2}]}}, "data.train[0].file: is required and was not given."),
        ({"data": {"train": {"file": "a", "weight": 0}}}, "data.train.weight: expected more than 0.0, got 0."),
        ({"data": {"train": [{"file": "a", "negatives": 2}]}}, "data.train[0].negatives: expected at most 1.0, got 2."),
        (
            {"data": {"train": [{"file": "a", "weigth": 2}]}},
            "data.train[0].weigth: no such option. Did you mean 'weight'?",
        ),
        (
            {"data": {"train": ["a", "b", {"file": "a", "weight": 2}]}},
            "data.train: a is given more than once, with different options; give it once.",
        ),
        ({"data": {"max_train_samples": "abc"}}, "data.max_train_samples: expected a whole number, got 'abc'."),
        ({"data": {"max_train_samples": 0}}, "data.max_train_samples: expected at least 1, got 0."),
        (
            {"data": {"on_bad_answer": "repair"}},
            "data.on_bad_answer: expected 'refuse', 'fix' or 'skip', got 'repair'.",
        ),
        ({"encoder": {"dropout": 1.5}}, "encoder.dropout: expected at most 1.0, got 1.5."),
        ({"encoder": {"name": ""}}, "encoder.name: expected a text of at least 1 character(s), got ''."),
        ({"encoder": {"name": "a\0b"}}, r"encoder.name: expected the name of a file, got 'a\x00b'."),
        ({"learner": {"mixer": []}}, "learner.mixer: expected a list of at least 1, got []."),
        ({"learner": {"seed": 2**32}}, "learner.seed: expected at most 4294967295, got 4294967296."),
        ({"encoder": {"form": "first"}}, "encoder.form: no such option. Did you mean 'from'?"),
        ({"learner": {"batch_size": 3}}, "learner.batch_size: no such option here. Did you mean training.batch_size?"),
        ({"learner": {"zzz": 3}}, None),
        ({"learner": {"se\ned": 3}}, r"learner.se\ned: no such option. Did you mean 'seed'?"),
        ({"learner": {"mixer": {"name": "dot", "a\nb": 1}}}, None),
        ({"learner": {"mixer": "a\nb"}}, None),
        ({"a\nb": {"mixer": "dot"}}, None),
        ({"a" * 10_000: 1}, None),
        (
            {"training": {"evaluate_every": "0 steps"}},
            "training.evaluate_every: expected a number or a text such as \"300 steps\", got '0 steps'.",
        ),
        ({"training": {"evaluate_every": 0}}, None),
        ({"plugins": "a b"}, "plugins: expected the name of a module, such as \"my_package.parts\", got 'a b'."),
        (
            {"plugins": ["os", "no_such_package.parts"]},
            "plugins[1]: plugin 'no_such_package.parts' cannot be imported: No module named 'no_such_package'; install "
            "the package that holds it.",
        ),
        (
            {"training": {"num_train_epochs": 3}},
            "training.num_train_epochs: is an option of transformers; use training.epochs instead.",
        ),
        (
            {"per_device_train_batch_size": 8},
            "per_device_train_batch_size: is an option of transformers; use training.batch_size instead.",
        ),
        (
            {"learner": {"warmup_ratio": 0.1}},
            "learner.warmup_ratio: is an option of transformers; use learner.schedule = "
            '{ name = "linear", warmup = 0.1 } instead.',
        ),
        ({"training": {"seed": 3}}, "training.seed: no such option here. Did you mean learner.seed?"),
        ({"training": 3}, "training: expected a table of options, got 3."),
        ({"training": {"epochs": float("inf")}}, "training.epochs: expected a finite number, got inf."),
        ({"decoding": {"null_score_diff_threshold": float("nan")}}, None),
    ],
)
def test_a_problem_is_one_plain_line(table: dict[str, Any], expected: str | None) -> None:
    (problem,) = problems(table)
    assert expected is None or problem == expected
    assert "\n" not in problem
    assert not re.search(r"pydantic|https?:|input should|validation|instance of|\w\[type", problem, re.IGNORECASE)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 500),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["name", "k"]), st.sampled_from(["full", "span", 3]), max_size=2),
)
options = {
    name: [*field.annotation.model_fields, "typo"]
    for name, field in RunConfig.model_fields.items()
    if name != "plugins"
}
tables = st.dictionaries(
    st.sampled_from([*options, "typo"]),
    st.one_of(values, *(st.dictionaries(st.sampled_from(keys), values, max_size=3) for keys in options.values())),
    max_size=4,
)


@given(tables)
def test_any_table_gives_a_configuration_or_a_list_of_plain_problems(table: dict[str, Any]) -> None:
    found: tuple[str, ...] = ()
    try:
        config = check_config(table, where="x")
    except ConfigError as error:
        found = error.problems
    else:
        assert check_config(json.loads(json.dumps(config.model_dump(mode="json"))), where="x") == config
    for problem in found:
        assert problem.isprintable(), problem
        assert re.split(r"[.:\[]", problem)[0] in {*options, "typo"}, problem
        assert not re.search(r"pydantic|https?:|input should", problem, re.IGNORECASE), problem


def test_every_option_of_the_trainer_leads_to_one_that_exists() -> None:
    for name, hint in TRAINER_OPTIONS.items():
        assert not any(name in names for names in options.values()), name
        option = hint.split(" ")[0]
        section, _, key = option.partition(".")
        assert key in options[section] if key else hint.startswith("the option --"), hint
        if "=" in hint:  # an example: it must be accepted
            value = hint.partition(" = ")[2].removesuffix(" (a share of all steps)")
            load_config(None, [f"{option}={value}"])


@pytest.mark.parametrize(
    "name", ["per_device_train_batch_size", "per_gpu_train_batch_size", "logging_steps", "do_train"]
)
def test_a_hint_is_near_or_the_whole_list(name: str) -> None:
    (problem,) = problems({"training": {name: 3}})
    assert "Did you mean" not in problem, problem


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"doc_stride": 316}, "windows.doc_stride: expected an overlap below 316"),
        ({"doc_stride": 0, "stride_is": "step"}, "windows.doc_stride: expected a step of at least 1, got 0."),
        ({"max_seq_length": 68}, "windows.max_seq_length: expected room for a question"),
        ({"merge": "leads", "method": "independent"}, 'decoding.merge: expected "scores" with decoding.method'),
    ],
)
def test_rules_across_options(options: dict[str, Any], expected: str) -> None:
    (problem,) = problems({expected.partition(".")[0]: options})
    assert problem.startswith(expected)


def test_the_limits_of_the_rules_are_allowed() -> None:
    assert check_config({"windows": {"doc_stride": 315}}, where="").windows.doc_stride == 315
    assert check_config({"windows": {"max_seq_length": 69, "doc_stride": 0}}, where="").windows.max_seq_length == 69
    assert check_config({"training": {"epochs": 0, "max_steps": 0}}, where="").training.max_steps == 0
    assert problems({"training": {"epochs": 0}})


def test_a_rule_is_silent_about_a_section_that_is_wrong_already() -> None:
    assert problems({"windows": {"max_seq_length": "long", "doc_stride": 500}}) == {
        "windows.max_seq_length: expected a whole number, got 'long'."
    }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.epochs=3"], {"training": {"epochs": 3.0}}),
        (["learner.learning_rate=3e-4"], {"learner": {"learning_rate": 3e-4}}),
        (["training.max_steps = 1_000"], {"training": {"max_steps": 1000}}),
        (["encoder.name=some/encoder"], {"encoder": {"name": "some/encoder"}}),
        (["encoder.name= some/encoder "], {"encoder": {"name": "some/encoder"}}),
        (["encoder.name='with space'"], {"encoder": {"name": "with space"}}),
        (['encoder.name="12"'], {"encoder": {"name": "12"}}),
        (["encoder.name=a=b"], {"encoder": {"name": "a=b"}}),
        (["data.train=first.json"], {"data": {"train": ["first.json"]}}),
        (['data.train=["first.json", "second.json"]'], {"data": {"train": ["first.json", "second.json"]}}),
        (["data.dev=first.json", "data.dev=[]"], {}),
        (["encoder.tuning=frozen"], {"encoder": {"tuning": {"name": "frozen"}}}),
        (["encoder.tuning.name=frozen"], {"encoder": {"tuning": {"name": "frozen"}}}),
        (
            ["learner.schedule=linear", "learner.schedule.warmup=0.5"],
            {"learner": {"schedule": {"name": "linear", "warmup": 0.5}}},
        ),
        (
            ['learner.schedule={name = "linear", warmup = 0.5}'],
            {"learner": {"schedule": {"name": "linear", "warmup": 0.5}}},
        ),
        (["training.epochs=3", "training.epochs=4"], {"training": {"epochs": 4.0}}),
    ],
)
def test_set(overrides: list[str], expected: dict[str, Any]) -> None:
    assert settings(*overrides) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epochs", "--set epochs: expected section.key=value."),
        ("=3", "--set =3: expected section.key=value."),
        ("training..epochs=3", "--set training..epochs=3: expected section.key=value."),
        ("epochs=3", "epochs: no such option here. Did you mean training.epochs?"),
        ("training.epochs=", "training.epochs: expected a number, got ''."),
        ("encoder.name=12", "encoder.name: expected a text in quotes, got 12."),
        (
            "data.train=[first.json, second.json]",
            '--set data.train=[first.json, second.json]: expected a TOML value, such as ["a", "b"] or '
            '{name = "a", k = 3}.',
        ),
    ],
)
def test_a_bad_override_is_reported(override: str, expected: str) -> None:
    assert set_problem(override) == expected


def test_overrides_go_on_top_of_the_file_and_their_problems_are_reported_with_its_own(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[training]\nepochs = 1\nbatch_size = 8\n[learner]\nschedule = "cosine"\nmixer = ["last"]\n')
    config = load_config(file, ["training.epochs=5", "learner.schedule.warmup=0.3"])
    assert (config.training.epochs, config.training.batch_size) == (5.0, 8)
    assert config.learner.schedule == {"name": "cosine", "warmup": 0.3}
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["nonsense", "training.epochs=-1", "learner.mixer.k=3", "training.epochs.x=3"])
    assert set(caught.value.problems) == {
        "--set nonsense: expected section.key=value.",
        "--set learner.mixer.k=3: mixer is not a table.",
        "--set training.epochs.x=3: epochs is not a table.",
        "training.epochs: expected at least 0.0, got -1.",
    }


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("run.toml", b"[training]\nepochs = = 2\n", r"run\.toml: broken TOML: .*line 2, column 10"),
        ("run.toml", b"epochs = 1\nepochs = 2\n", r"run\.toml: broken TOML: .*line 2"),
        ("train.csv", b"id,question\n", r"train\.csv: broken TOML: .*; expected a TOML file, such as run\.toml\."),
        (
            "run.toml",
            b"name = '\xff'\n",
            r"run\.toml: expected UTF-8 text, got byte 0xff at position 8 .*; save it as UTF-8\.$",
        ),
        ("config.json", b'{"training":\n {"epochs": }}', r"config\.json:2:13: broken JSON: "),
        ("config.json", b"[1, 2]", r"config\.json: expected tables of options, got \[1, 2\]\.$"),
        ("run.toml", None, r"run\.toml: no such file\.$"),
    ],
)
def test_an_unreadable_file_is_reported_with_its_position(
    tmp_path: Path, name: str, content: bytes | None, expected: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableError, match=expected) as caught:
        load_config(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_folder_is_no_run_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"cannot be read \(Is a directory\)\.$"):
        load_config(tmp_path)


def test_the_config_json_of_a_run_repeats_the_run(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            "data.train=a.json",
            "training.max_steps=7",
            "encoder.dropout=0.25",
            "encoder.tuning=frozen",
            "learner.schedule={name='cosine_with_restarts', cycles=3}",
            "learner.head_learning_rate=1e-3",
            "decoding.null_score_diff_threshold=-1.5",
        ],
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
    assert load_config(file) == config
    assert load_config(file) != RunConfig()


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\nepochs = 1\n")
    assert load_config(file).training.epochs == 1


def test_configurations_do_not_share_their_defaults() -> None:
    first, second = RunConfig(), RunConfig()
    first.learner.mixer.append({"name": "mine"})
    assert second.learner.mixer == [{"name": "last"}]
