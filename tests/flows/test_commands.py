"""Every command end to end on a tiny encoder: files, exit codes, and the messages for users' mistakes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from forks import ForkServer
from lamella import runs
from lamella.__main__ import main
from lamella.data.demo import data_path
from lamella.data.file_formats.formats import read
from outcomes import timeless_history

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [
    "data.train=demo:train",
    "data.dev=demo:dev",
    "data.max_train_samples=8",
    "data.max_eval_samples=12",
    "windows.max_seq_length=128",
    "windows.doc_stride=32",
    "windows.max_query_length=24",
    "training.precision=fp32",
    "training.epochs=1",
    "training.batch_size=4",
]


def settings(*more: str) -> list[str]:
    return [word for setting in (*SMALL, *more) for word in ("--set", setting)]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder") / "tiny", num_hidden_layers=2)


@pytest.fixture(scope="session")
def empty_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text("")
    return path


@pytest.fixture(scope="session")
def run_folder(encoder: Path, empty_config: Path, forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished training run, made by the real command in a process of its own."""
    out = tmp_path_factory.mktemp("runs") / "first"
    code, _, err = forks.run("train", empty_config, "--out", out, *settings(f"encoder.name={encoder}"))
    assert (code, err) == (0, "")
    return out


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions of the bundled dev set, for tests in which any data will do."""
    path = tmp_path_factory.mktemp("data") / "few.json"
    document = json.loads(data_path("demo:dev").read_text(encoding="utf-8"))
    first = document["data"][0]["paragraphs"][0]
    document["data"] = [{"title": "Saturn", "paragraphs": [{**first, "qas": first["qas"][:3]}]}]
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_train_writes_the_whole_run_folder(run_folder: Path) -> None:
    names = {path.name for path in run_folder.iterdir()}
    assert names == {
        "run.json",
        "environment.json",
        "config.json",
        "history.jsonl",
        "model",
        "predictions.json",
        "nbest_predictions.json",
        "null_odds.json",
        "na_prob.json",
        "eval_results.json",
        "cost.json",
    }
    assert read_json(run_folder / "run.json")["state"] == "finished"
    assert read_json(run_folder / "environment.json")["libraries"]["torch"]
    history = [json.loads(line) for line in (run_folder / "history.jsonl").read_text().splitlines()]
    steps = [record for record in history if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    assert all(math.isclose(step["loss"], (step["start"] + step["end"]) / 2, rel_tol=1e-5) for step in steps)
    assert history[-1]["f1"] == read_json(run_folder / "eval_results.json")["f1"]


def test_the_model_card_lists_the_data_and_the_scores(run_folder: Path) -> None:
    card = (run_folder / "model" / "README.md").read_text(encoding="utf-8")
    results = read_json(run_folder / "eval_results.json")
    assert "| train | `demo:train` | 8 |" in card
    assert "| dev | `demo:dev` | 12 |" in card
    assert f"| f1 | {results['f1']:.2f} |" in card
    assert "# A reader on tiny\n" in card
    assert str(run_folder.parent.parent) not in card


def test_the_config_of_a_run_folder_repeats_the_run(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    """Same seed, same losses, same model, bit for bit."""
    code, _, err = lamella("train", run_folder / "config.json", "--out", tmp_path / "again")
    assert (code, err) == (0, "")
    assert timeless_history(tmp_path / "again" / "history.jsonl") == timeless_history(run_folder / "history.jsonl")
    for name in ("config.json", "eval_results.json", "predictions.json", "model/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (run_folder / name).read_bytes(), name


def test_another_seed_gives_another_model(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    config = run_folder / "config.json"
    assert lamella("train", config, "--out", tmp_path / "other", "--set", "learner.seed=1")[0] == 0
    ours, others = (folder / "model" / "model.safetensors" for folder in (run_folder, tmp_path / "other"))
    assert ours.read_bytes() != others.read_bytes()


def test_evaluate_with_a_model_agrees_with_the_training_run(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    dev = tmp_path / "dev.json"
    document = json.loads(data_path("demo:dev").read_text(encoding="utf-8"))
    first = document["data"][0]["paragraphs"]
    document["data"] = [{"title": "Saturn", "paragraphs": [first[0], {**first[1], "qas": first[1]["qas"][:3]}]}]
    dev.write_text(json.dumps(document), encoding="utf-8")  # the twelve questions that the run scored
    as_trained = ["--precision", "fp32", "--json"]
    code, out, err = lamella("evaluate", dev, "--model", run_folder, "--out", tmp_path / "dev", *as_trained)
    assert (code, err) == (0, "")
    ours, trained = json.loads(out), read_json(run_folder / "eval_results.json")
    expected = {key: value for key, value in trained.items() if key not in ("step", "epoch")}
    assert ours == pytest.approx(expected, abs=1e-4)  # computed by onnxruntime, the run's by torch
    assert read_json(tmp_path / "dev" / "predictions.json") == read_json(run_folder / "predictions.json")

    code, out, err = lamella("evaluate", dev, tmp_path / "dev" / "predictions.json", "--json")
    assert (code, err) == (0, "")
    scored = json.loads(out)
    assert scored == {key: ours[key] for key in scored}


def test_evaluate_scores_a_predictions_file(lamella: Any, tmp_path: Path) -> None:
    examples = read("demo:dev").examples
    perfect = {example.id: example.answers[0].text if example.answers else "" for example in examples}
    odds = {example.id: -1.0 if example.answers else 1.0 for example in examples}
    (tmp_path / "predictions.json").write_text(json.dumps(perfect))
    (tmp_path / "odds.json").write_text(json.dumps(odds))
    files = ("demo:dev", tmp_path / "predictions.json", "--null-odds", tmp_path / "odds.json")
    code, out, err = lamella("evaluate", *files, "--json")
    assert (code, err) == (0, "")
    results = json.loads(out)
    assert results["exact"] == results["f1"] == results["best_f1"] == 100.0
    assert (results["total"], results["HasAns_total"], results["NoAns_total"]) == (135, 90, 45)
    assert results["best_f1_thresh"] == -1.0
    assert "best_f1" in lamella("evaluate", *files)[1]


def test_a_missing_prediction_is_an_error_that_lists_the_ids(lamella: Any, tmp_path: Path) -> None:
    examples = read("demo:dev").examples
    (tmp_path / "p.json").write_text(json.dumps({example.id: "" for example in examples[2:]}))
    code, out, err = lamella("evaluate", "demo:dev", tmp_path / "p.json")
    assert (code, out) == (1, "")
    assert examples[0].id in err
    assert examples[1].id in err
    assert "(missing='empty'; --missing empty)" in err
    code, out, _ = lamella("evaluate", "demo:dev", tmp_path / "p.json", "--missing", "empty", "--json")
    assert code == 0
    assert json.loads(out)["total"] == 135


def test_predict_writes_the_four_files(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    code, out, err = lamella("predict", "demo:dev", "--model", run_folder, "--out", tmp_path / "p")
    assert code == 0
    assert re.fullmatch(r"warning: \d+ questions cut to 24 tokens each, .*max_query_length\.\n", err)
    assert "135 questions" in out
    predictions = read_json(tmp_path / "p" / "predictions.json")
    best = read_json(tmp_path / "p" / "nbest_predictions.json")
    odds = read_json(tmp_path / "p" / "null_odds.json")
    na_prob = read_json(tmp_path / "p" / "na_prob.json")
    contexts = {example.id: example.context.text for example in read("demo:dev").examples}
    assert predictions.keys() == best.keys() == odds.keys() == na_prob.keys() == contexts.keys()
    for id, candidates in best.items():
        assert all(contexts[id][candidate["start"] : candidate["end"]] == candidate["text"] for candidate in candidates)
        assert math.isclose(sum(candidate["probability"] for candidate in candidates), 1.0)
        answers = [candidate["text"] for candidate in candidates if candidate["text"]]
        assert predictions[id] == ("" if odds[id] > 0 else answers[0])
        assert (na_prob[id] > 0.5) == (odds[id] > 0)


def test_ask_from_a_file_and_from_standard_input(
    run_folder: Path, lamella: Any, forks: ForkServer, tmp_path: Path
) -> None:
    text = "Titan was discovered by Christiaan Huygens in 1655."
    (tmp_path / "titan.txt").write_text(text)
    code, out, err = lamella("ask", "Who?", "-c", tmp_path / "titan.txt", "-m", run_folder, "--top-k", 3, "--json")
    assert (code, err) == (0, "")
    answers = json.loads(out)["answers"]
    assert len(answers) == 3
    assert all(text[answer["start"] : answer["end"]] == answer["answer"] for answer in answers)
    code, piped, _ = forks.run("ask", "Who?", "-c", "-", "-m", run_folder, "--top-k", 3, "--json", stdin=text)
    assert code == 0
    assert json.loads(piped)["answers"] == answers
    lines = lamella("ask", "Who?", "-c", tmp_path / "titan.txt", "-m", run_folder, "--top-k", 3)[1]
    for answer in answers:
        place = f"characters {answer['start']}-{answer['end']}" if answer["answer"] else "not in the text"
        assert f"{answer['answer'] or '(no answer)'}  [{answer['probability']:.2f}, {place}]\n" in lines


def test_ask_of_several_files(run_folder: Path, lamella: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"a.txt": "Titan was discovered by Christiaan Huygens.", "-": "Kuiper saw its air."}
    Path("a.txt").write_text(texts["a.txt"])
    Path("b.txt").write_text(texts["-"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(texts["-"].encode())))
    call = ("ask", "Who?", "-m", run_folder, "--top-k", 20)
    code, out, err = lamella(*call, "-c", "a.txt", "-c", "-", "--json")
    assert (code, err) == (0, "")
    answers = [answer for answer in json.loads(out)["answers"] if answer["answer"]]
    assert {answer["file"] for answer in answers} == set(texts)
    assert all(texts[answer["file"]][answer["start"] : answer["end"]] == answer["answer"] for answer in answers)
    assert [answer["file"] for answer in json.loads(out)["answers"] if not answer["answer"]] in ([], [None])

    shown = lamella(*call, "-c", "a.txt", "-c", "b.txt")[1].splitlines()
    lines = [line for line in shown if not line.startswith("  ")]  # not the sentences of the answers
    assert {name for line in lines for name in ("a.txt", "b.txt") if f", {name}, characters " in line} == {
        "a.txt",
        "b.txt",
    }
    assert all(", characters " in line or line.startswith("(no answer)  [") for line in lines)
    assert ".txt" not in lamella(*call, "-c", "a.txt")[1]
    assert "file" not in json.loads(lamella(*call, "-c", "a.txt", "--json")[1])["answers"][0]


def test_ask_about_a_text_itself(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    text = "Titan was discovered by Christiaan Huygens in 1655."
    (tmp_path / "titan.txt").write_text(text)
    call = ("ask", "Who?", "-m", run_folder, "--top-k", 3, "--json")
    code, out, err = lamella(*call, "--text", text)
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(lamella(*call, "-c", tmp_path / "titan.txt")[1])
    together = json.loads(lamella(*call, "-t", text, "-c", tmp_path / "titan.txt", "-t", "Nothing.")[1])["answers"]
    assert {answer["file"] for answer in together} <= {"text 1", "text 2", str(tmp_path / "titan.txt"), None}


def test_ask_reads_html_without_its_tags(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    text = "Titan\n\nDiscovered by Huygens & co. in 1655."
    page = "<h1>Titan</h1><script>let x = 1</script><p>Discovered by <b>Huygens</b> &amp; co. in 1655.</p>"
    (tmp_path / "titan.txt").write_text(text)
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "page.txt").write_text(f"<!DOCTYPE html>{page}")
    call = ("ask", "Who?", "-m", run_folder, "--top-k", 3, "--json")
    expected = json.loads(lamella(*call, "-c", tmp_path / "titan.txt")[1])
    for name in ("page.html", "page.txt"):
        code, out, err = lamella(*call, "-c", tmp_path / name)
        assert code == 0
        assert json.loads(out) == expected
        assert err == f"{tmp_path / name}: read as HTML; positions are characters of the text without tags\n"
    assert lamella(*call, "--text", page)[2] == ""  # a text is read as it is


def test_train_selects_a_named_run_and_leaves_those_that_build_on_others_to_sweep(
    lamella: Any, encoder: Path, tmp_path: Path
) -> None:
    (tmp_path / "base.toml").write_text(f'[encoder]\nname = "{encoder}"\ntuning = "frozen"\n')
    file = tmp_path / "table.toml"
    file.write_text(
        'extends = "base.toml"\n'
        '[[run]]\nname = "dot"\nlearner.mixer = "dot"\n'
        '[[run]]\nname = "next"\nencoder.from = "dot"\n'
    )
    tiny = settings("training.max_steps=1")
    code, _, err = lamella("train", file, "--run", "dot", "--out", tmp_path / "run", *tiny)
    assert (code, err) == (0, "")
    resolved = read_json(tmp_path / "run" / "config.json")
    assert resolved["learner"]["mixer"] == [{"name": "dot"}]
    assert resolved["encoder"]["name"] == str(encoder)
    assert not resolved.keys() & {"extends", "run"}
    code, _, err = lamella("train", file, "--out", tmp_path / "all", *tiny)
    assert (code, err.count("\n")) == (2, 1)
    assert "run next starts from run dot of the same file" in err
    code, _, err = lamella("train", file, "--run", "dto", "--out", tmp_path / "all", *tiny)
    assert code == 2
    assert "run 'dto' does not exist. Known: dot, next." in err
    code, _, _ = lamella("sweep", file, "--out", tmp_path / "all", *tiny)
    assert code == 0
    assert (tmp_path / "all" / "next" / "model" / "config.json").is_file()


def test_the_reader_in_python_answers_as_the_command_does(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    import lamella as package

    text = "Titan was discovered by Christiaan Huygens in 1655."
    (tmp_path / "titan.txt").write_text(text)
    out = lamella("ask", "Who?", "-c", tmp_path / "titan.txt", "-m", run_folder, "--top-k", 4, "--json")[1]
    assert package.Reader.load(run_folder).ask("Who?", text, top_k=4).to_json() == json.loads(out)


def test_convert_and_back(lamella: Any, tmp_path: Path) -> None:
    assert lamella("convert", "demo:dev", tmp_path / "flat.jsonl.gz")[0] == 0
    assert lamella("convert", tmp_path / "flat.jsonl.gz", tmp_path / "squad.json")[0] == 0
    original, back = read("demo:dev").examples, read(tmp_path / "squad.json").examples
    assert [(example.id, example.question, example.answers, example.context.text) for example in original] == [
        (example.id, example.question, example.answers, example.context.text) for example in back
    ]


def test_check_of_the_bundled_data_is_clean(lamella: Any) -> None:
    code, out, err = lamella("check", "demo:train", "demo:dev")
    assert (code, err) == (0, "")
    assert "no problems" in out


def test_check_lists_the_first_problems_of_each_kind(lamella: Any, tmp_path: Path) -> None:
    missing = {"text": ["zz"], "answer_start": [0]}
    rows = [{"id": f"q{n}", "question": f"Q{n}?", "context": f"Text {n}", "answers": missing} for n in range(25)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = lamella("check", data)
    assert (code, out.count(": error answer_not_in_context: ")) == (1, 20)
    assert f"{data}: 5 more: error answer_not_in_context; --all lists them\n" in out
    assert "error answer_not_in_context: 25" in out
    assert lamella("check", data, "--all")[1].count(": error answer_not_in_context: ") == 25


def test_check_reports_fixes_and_the_fixed_file_is_clean(lamella: Any, tmp_path: Path) -> None:
    document = json.loads(data_path("demo:dev").read_text(encoding="utf-8"))
    qa = next(qa for qa in document["data"][0]["paragraphs"][0]["qas"] if qa["answers"])
    for answer in qa["answers"]:
        answer["answer_start"] += 3
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(document), encoding="utf-8")
    code, out, _ = lamella("check", bad, "--json")
    assert code == 1
    problems = json.loads(out)["problems"]
    assert {(problem["id"], problem["kind"], problem["article"], problem["fixable"]) for problem in problems} == {
        (qa["id"], "answer_shifted", "Saturn", True)
    }
    code, out, _ = lamella("check", bad, "--fix-to", tmp_path / "good.json")
    assert code == 1
    assert qa["id"] in out
    assert lamella("check", tmp_path / "good.json")[0] == 0
    assert [example.answers for example in read(tmp_path / "good.json").examples] == [
        example.answers for example in read("demo:dev").examples
    ]


def test_training_refuses_bad_answers_unless_they_are_skipped(
    lamella: Any, encoder: Path, empty_config: Path, tmp_path: Path
) -> None:
    document = json.loads(data_path("demo:train").read_text(encoding="utf-8"))
    qas = document["data"][0]["paragraphs"][0]["qas"]
    next(qa for qa in qas if qa["answers"])["answers"] = [{"text": "nowhere to be found", "answer_start": 0}]
    (tmp_path / "bad.json").write_text(json.dumps(document), encoding="utf-8")
    changes = settings(f"encoder.name={encoder}", f"data.train={tmp_path / 'bad.json'}")
    code, _, err = lamella("train", empty_config, "--out", tmp_path / "run", *changes)
    assert code == 1
    assert "lamella check" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    again = ("train", empty_config, "--out", tmp_path / "run", "--on-bad-answer", "skip", *changes)
    code, out, _ = lamella(*again)
    assert code == 0
    assert "1 question skipped" in out
    assert "warning" not in out


def test_training_prints_the_number_of_warnings(
    lamella: Any, encoder: Path, empty_config: Path, tmp_path: Path
) -> None:
    document = json.loads(data_path("demo:train").read_text(encoding="utf-8"))
    document["data"][0]["paragraphs"][0]["qas"][0]["question"] = "What\x07?"
    data = tmp_path / "odd.json"
    data.write_text(json.dumps(document), encoding="utf-8")
    changes = settings(f"encoder.name={encoder}", f"data.train={data}")
    code, out, _ = lamella("train", empty_config, "--out", tmp_path / "run", *changes)
    assert code == 0
    assert f"{data}: 1 warning; see lamella check {data}\n" in out


def test_a_tuned_encoder_can_start_the_next_run(run_folder: Path, lamella: Any, few: Path, tmp_path: Path) -> None:
    changes = settings(f"encoder.name={run_folder}", "encoder.tuning=frozen", "data.dev=[]")
    code, out, err = lamella("train", run_folder / "config.json", "--out", tmp_path / "second", *changes)
    assert (code, err) == (0, "")
    assert "trainable params: 66 ||" in out  # 2 x 32 + 2: the head alone
    base = read_json(tmp_path / "second" / "model" / "config.json")["base"]
    assert base["name"] == str(run_folder)
    assert lamella("predict", few, "-m", tmp_path / "second", "-o", tmp_path / "p")[0] == 0


def test_a_killed_run_is_marked_unfinished(
    encoder: Path, empty_config: Path, lamella: Any, forks: ForkServer, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    endless = settings(f"encoder.name={encoder}", "training.epochs=100000", "training.evaluate_every=1")
    process = forks.start("train", empty_config, "--out", out, *endless)
    try:
        deadline = time.monotonic() + 120
        while not (out / "model" / "config.json").is_file() and time.monotonic() < deadline:
            assert not process.ended()
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert read_json(out / "run.json")["state"] == "unfinished"
    code, _, err = lamella("train", empty_config, "--out", out, *settings(f"encoder.name={encoder}"))
    assert code == 1
    assert "unfinished" in err
    assert lamella("train", empty_config, "--out", out, "--overwrite", *settings(f"encoder.name={encoder}"))[0] == 0
    assert read_json(out / "run.json")["state"] == "finished"
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_a_model_that_predicts_only_whether_there_is_an_answer(
    lamella: Any, encoder: Path, empty_config: Path, tmp_path: Path
) -> None:
    changes = settings(
        f"encoder.name={encoder}", "learner.task=answerability", "learner.mixer=scalar_mix", "learner.layers=all"
    )
    code, out, err = lamella("train", empty_config, "--out", tmp_path / "run", *changes)
    assert (code, err) == (0, "")
    assert "no-answer F1" in out
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"na_prob.json", "null_odds.json", "eval_results.json"} <= names
    assert not names & {"predictions.json", "nbest_predictions.json"}
    out = lamella("evaluate", "demo:dev", "-m", tmp_path / "run", "-o", tmp_path / "dev", "--json")[1]
    assert set(json.loads(out)) == {
        "total",
        "answerability_accuracy",
        "answerability_f1",
        "answerability_ap",
        "answerability_accuracy_at_0",
        "crossfit_answerability_accuracy",
        "threshold",
        "ece",
    }
    (tmp_path / "text.txt").write_text("Nobody knows.")
    code, _, err = lamella("ask", "Who?", "-c", tmp_path / "text.txt", "-m", tmp_path / "run")
    assert code == 2
    assert "whether" in err


@pytest.mark.parametrize("tuning", ["adapter", "lora", "top_k"])
def test_a_small_delta_trains_and_loads(
    tuning: str, lamella: Any, encoder: Path, empty_config: Path, few: Path, tmp_path: Path
) -> None:
    changes = settings(f"encoder.name={encoder}", f"encoder.tuning={tuning}", "learner.mixer=dot")
    assert lamella("train", empty_config, "--out", tmp_path / "run", *changes)[0] == 0
    assert lamella("predict", few, "-m", tmp_path / "run", "-o", tmp_path / "p")[0] == 0
    weights = (tmp_path / "run" / "model" / "model.safetensors").stat().st_size
    assert weights < (encoder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("mistake", ["data.train=nowhere.json", "encoder.name=no/where", "learner.layers=[7]"])
def test_a_mistake_does_not_destroy_an_earlier_run(
    mistake: str, run_folder: Path, lamella: Any, tmp_path: Path
) -> None:
    """Everything is read and checked before the folder is touched."""
    shutil.copytree(run_folder, tmp_path / "run")
    call = ("train", run_folder / "config.json", "--out", tmp_path / "run", "--overwrite", "--set", mistake)
    assert lamella(*call)[0] in (1, 2)
    assert read_json(tmp_path / "run" / "run.json")["state"] == "finished"
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("command", ["predict", "evaluate"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [(2, "predictions can hold only one answer per id"), (0, "expected questions, found none; list")],
)
def test_a_faulty_data_file_does_not_destroy_an_earlier_run(
    command: str, rows: int, message: str, run_folder: Path, lamella: Any, few: Path, tmp_path: Path
) -> None:
    qa = {"id": "twice", "question": "Who?", "answers": [], "is_impossible": True}
    paragraph = {"context": "Huygens found it.", "qas": [{**qa, "question": f"Who {n}?"} for n in range(rows)]}
    document = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [paragraph]}] if rows else []}
    (tmp_path / "data.json").write_text(json.dumps(document))
    assert lamella(command, few, "-m", run_folder, "-o", tmp_path / "run")[0] == 0
    call = (command, tmp_path / "data.json", "-m", run_folder, "-o", tmp_path / "run", "--keep-logits", "--overwrite")
    code, _, err = lamella(*call)
    assert (code, message in err, err.count("\n")) == (1, True, 1)
    assert read_json(tmp_path / "run" / "run.json")["state"] == "finished"
    assert len(read_json(tmp_path / "run" / "predictions.json")) == 3


def test_a_submission_that_cannot_be_written_is_refused_at_once(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    data = Path(shutil.copy(data_path("demo:dev"), tmp_path / "dev.json"))
    before = data.read_bytes()
    call = ("predict", data, "-m", run_folder, "-o", tmp_path / "p", "--submission")
    for place, message in (
        (tmp_path, "got a folder"),
        (tmp_path / "." / "dev.json", "is read by this command"),
        (tmp_path / "p" / "predictions.json", "is a file of the run itself"),
    ):
        code, _, err = lamella(*call, place)
        assert (code, message in err, err.count("\n")) == (1, True, 1)
    assert not (tmp_path / "p").exists()
    assert data.read_bytes() == before
    assert lamella(*call, tmp_path / "p" / "answers.csv")[0] == 0
    assert (tmp_path / "p" / "answers.csv").read_text().startswith("Id,Predicted")


def test_a_run_in_progress_cannot_be_overwritten(
    lamella: Any, encoder: Path, empty_config: Path, tmp_path: Path
) -> None:
    call = ("train", empty_config, "--out", tmp_path / "run", "--overwrite", *settings(f"encoder.name={encoder}"))
    with runs.new_run(tmp_path / "run", "train"):
        code, _, err = lamella(*call)
    assert code == 1
    assert "another process" in err
    assert lamella(*call)[0] == 0


def test_korean_is_scored_as_korean_in_training_and_after_conversion(
    lamella: Any, encoder: Path, empty_config: Path, tmp_path: Path
) -> None:
    context = "임종석은 1989년 2월 15일에 여의도 농민 폭력 시위를 주도한 혐의로 지명수배되었다."
    qas = [
        {"id": f"k{n}", "question": "언제?", "answers": [{"text": text, "answer_start": context.index(text)}]}
        for n, text in enumerate(["1989년 2월 15일", "여의도 농민 폭력 시위", "혐의로", "임종석은"])
    ]
    document = {
        "version": "KorQuAD_v1.0_dev",
        "data": [{"title": "임", "paragraphs": [{"context": context, "qas": qas}]}],
    }
    (tmp_path / "ko.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    data = [f"data.train={tmp_path / 'ko.json'}", f"data.dev={tmp_path / 'ko.json'}"]
    decoding = "decoding.null_score_diff_threshold=100"  # always answer
    changes = settings(f"encoder.name={encoder}", *data, decoding)
    code, out, _ = lamella("train", empty_config, "--out", tmp_path / "run", *changes)
    assert code == 0
    assert "1 context in both the train and the dev data" in out
    assert lamella("convert", tmp_path / "ko.json", tmp_path / "ko.jsonl")[0] == 0
    scores = [read_json(tmp_path / "run" / "eval_results.json")["f1"]]
    for name in ("ko.json", "ko.jsonl"):
        out = lamella("evaluate", tmp_path / name, "-m", tmp_path / "run", "-o", tmp_path / f"{name}-run", "--json")[1]
        scores.append(json.loads(out)["f1"])
    english = lamella(
        "evaluate", tmp_path / "ko.json", tmp_path / "ko.json-run" / "predictions.json", "--language", "en", "--json"
    )[1]
    assert scores[0] == scores[1] == scores[2] != json.loads(english)["f1"]


def test_unlabelled_questions_are_answered_but_neither_trained_on_nor_scored(
    lamella: Any, run_folder: Path, tmp_path: Path
) -> None:
    rows = [{"id": f"u{n}", "question": "Who?", "context": "Huygens found it."} for n in range(3)]
    data = tmp_path / "bare.json"
    data.write_text(json.dumps(rows))
    assert lamella("predict", data, "-m", run_folder, "-o", tmp_path / "p")[0] == 0
    code, _, err = lamella("convert", data, tmp_path / "bare.jsonl")
    assert code == 0
    assert "are written as unanswerable; use them for predictions only." in err
    for call in (
        ("train", run_folder / "config.json", "--set", f"data.train={data}"),
        ("evaluate", data, "-m", run_folder),
    ):
        code, _, err = lamella(*call, "-o", tmp_path / call[0])
        assert code == 1
        assert err.endswith(
            f"{data}: expected answers to train or score on, or is_impossible = true for no answer, found neither; "
            "`lamella predict` needs none.\n"
        )


def test_a_train_set_without_windows_is_an_error(lamella: Any, run_folder: Path, tmp_path: Path) -> None:
    context = "word " * 200
    row = {"id": "a", "question": "Which?", "context": context, "answers": [{"text": context[:900], "answer_start": 0}]}
    (tmp_path / "long.json").write_text(json.dumps([row]))
    changes = [f"data.train={tmp_path / 'long.json'}", "data.negative_windows=drop", "training.max_steps=3"]
    settings = [word for change in changes for word in ("--set", change)]
    code, _, err = lamella("train", run_folder / "config.json", "-o", tmp_path / "run", *settings)
    assert code == 1
    assert "no window" in err


def test_a_terminal_shows_a_progress_bar_with_the_loss(encoder: Path, empty_config: Path, tmp_path: Path) -> None:
    """The bar, its note and a nested bar appear on a pseudo-terminal, and nowhere else."""
    script = tmp_path / "bars.py"
    script.write_text(
        "import time, lamella.progress as p\n"
        "p.DELAY = 0.0\n"
        "with p.progress('training', 3) as outer:\n"
        "    for n in range(3):\n"
        "        outer(note=f'loss 1.{n}' if n == 1 else None)\n"
        "        with p.progress('answering', 2) as inner:\n"
        "            inner(); time.sleep(0.2); inner()\n"
        "        time.sleep(0.3)\n"
    )
    screen = subprocess.run(
        ["script", "-qec", f"{sys.executable} {script}", "/dev/null"], capture_output=True, text=True, check=True
    ).stdout
    assert "training" in screen
    assert "answering" in screen
    assert screen.count("loss 1.1") > 1  # the note stays during steps without a note
    piped = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert piped.stdout == piped.stderr == ""


def test_a_model_saved_during_training_can_start_the_next_run(
    lamella: Any, encoder: Path, empty_config: Path, tmp_path: Path
) -> None:
    changes = settings(f"encoder.name={encoder}", "training.save_at=[0, 0.5, 1]")
    assert lamella("train", empty_config, "--out", tmp_path / "row", *changes)[0] == 0
    assert sorted(path.name for path in (tmp_path / "row" / "models").iterdir()) == ["0", "0.5", "1"]
    second = ("train", empty_config, "--out", tmp_path / "next", *settings("encoder.tuning=frozen"))
    assert lamella(*second, "--set", "encoder.from=row@0.5")[0] == 0
    base = read_json(tmp_path / "next" / "model" / "config.json")["base"]
    assert base["name"] == str(tmp_path / "row" / "models" / "0.5")
    code, _, err = lamella(*second, "--overwrite", "--set", "encoder.from=row@0.7")
    assert code == 2
    assert "0, 0.5, 1" in err
    assert err.count("\n") == 1


def test_zero_steps_save_an_untrained_model(lamella: Any, encoder: Path, empty_config: Path, tmp_path: Path) -> None:
    changes = settings(f"encoder.name={encoder}", "training.max_steps=0")
    assert lamella("train", empty_config, "--out", tmp_path / "run", *changes)[0] == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_no_run_overwrites_what_it_reads(run_folder: Path, lamella: Any, few: Path, tmp_path: Path) -> None:
    """Neither its model, nor the encoder it starts from, nor the base of that encoder."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(run_folder, first)
    config = run_folder / "config.json"
    assert lamella("train", config, "--out", second, "--set", f"encoder.name={first}")[0] == 0
    for call in (
        ("train", config, "--out", first, "--overwrite", "--set", f"encoder.name={first}"),
        ("train", config, "--out", first, "--overwrite", "--set", f"encoder.name={second}"),
        ("predict", few, "--model", first, "--out", first, "--overwrite"),
        ("evaluate", few, "--model", first / "model", "--out", first, "--overwrite"),
        ("predict", few, "--model", first, "--out", first / "model" / "inside"),
    ):
        code, _, err = lamella(*call)
        assert (code, "choose another --out" in err) == (1, True), call
    assert (first / "model" / "model.safetensors").is_file()
    assert lamella("predict", few, "--model", second, "--out", tmp_path / "p")[0] == 0
    assert lamella("predict", few, "--model", first, "--out", first / "dev")[0] == 0  # a run may hold others


def test_a_model_on_a_relative_path_loads_from_another_folder(
    run_folder: Path, lamella: Any, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run_folder, tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    assert lamella("train", run_folder / "config.json", "--out", "second", "--set", "encoder.name=first")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert lamella("predict", few, "--model", "../second", "--out", "p")[0] == 0


def test_check_continues_after_a_file_that_cannot_be_read(lamella: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{broken")
    (tmp_path / "bare.json").write_text('[{"id": "a", "question": "Who?", "context": " ", "answers": []}]')
    code, out, err = lamella("check", "demo:dev", tmp_path / "broken.json", tmp_path / "bare.json")
    assert code == 2
    assert "empty_context" in out
    assert "broken.json:1:2" in err
    out = lamella("check", "demo:dev", tmp_path / "broken.json", "--json")[1]
    assert len(json.loads(out)["unreadable"]) == 1


def test_predict_accepts_answers_at_wrong_offsets(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    row = {
        "id": "a",
        "question": "Who?",
        "context": "Huygens found it.",
        "answers": [{"text": "gone", "answer_start": 3}],
    }
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    assert lamella("predict", tmp_path / "rows.json", "-m", run_folder, "-o", tmp_path / "p")[0] == 0
    (tmp_path / "gold.json").write_text(json.dumps([row, {**row, "id": "b", "question": None}]))
    (tmp_path / "predictions.json").write_text('{"a": "gone", "b": "wrong"}')
    code, _, err = lamella("evaluate", tmp_path / "gold.json", tmp_path / "predictions.json")
    assert code == 1
    assert "1 question cannot be read" in err


def test_predict_and_evaluate_warn_about_blank_questions(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    context = "Huygens found it."
    rows = [
        {"id": id, "question": question, "context": context, "answers": [{"text": "Huygens", "answer_start": 0}]}
        for id, question in {"a": "Who?", "b": " "}.items()
    ]
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows))
    warning = f"warning: {data}: 1 question without text, the first: 'b'; the predictions are arbitrary\n"
    code, out, err = lamella(
        "predict", data, "-m", run_folder, "-o", tmp_path / "p", "--submission", tmp_path / "s.csv"
    )
    assert (code, err) == (0, warning)
    assert "2 questions answered" in out
    assert read_json(tmp_path / "p" / "predictions.json").keys() == {"a", "b"}
    code, _, err = lamella("evaluate", data, "-m", run_folder, "-o", tmp_path / "e")
    assert (code, err) == (0, warning)
    for predictions in (tmp_path / "p" / "predictions.json", tmp_path / "s.csv"):
        code, out, err = lamella("evaluate", data, predictions, "--json")
        assert (code, err) == (0, warning)
        assert json.loads(out)["total"] == 2
    assert lamella("ask", " ", "--text", context, "-m", run_folder)[0] == 2


def test_evaluate_refuses_scores_that_are_no_probabilities(lamella: Any, tmp_path: Path) -> None:
    ids = [example.id for example in read("demo:dev").examples]
    for name, value in {"answers": "", "scores": 2.0}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(dict.fromkeys(ids, value)))
    call = ("evaluate", "demo:dev", tmp_path / "answers.json")
    code, _, err = lamella(*call, "--na-prob", tmp_path / "scores.json")
    assert code == 2
    assert f"scores.json: question {ids[0]!r}: expected a probability from 0 to 1, got 2.0; pass null odds" in err
    assert lamella(*call, "--null-odds", tmp_path / "scores.json")[0] == 0


def test_one_of_anything_is_written_in_the_singular(lamella: Any, tmp_path: Path) -> None:
    row = {"id": "a", "question": "Who?", "context": "Huygens found it.", "answers": ["Huygens"]}
    (tmp_path / "row.json").write_text(json.dumps([row]))
    out = lamella("check", tmp_path / "row.json", "--fix-to", tmp_path / "fixed.json")[1]
    assert "flat, 1 article, 1 context, 1 question (0 unanswerable)" in out
    assert "0 problems fixed, 0 not fixable, 0 questions dropped" in out
    assert (
        "out.jsonl: 1 question (0 fixed, 0 skipped)"
        in lamella("convert", tmp_path / "row.json", tmp_path / "out.jsonl")[1]
    )
    (tmp_path / "none.json").write_text("{}")
    code, _, err = lamella("evaluate", tmp_path / "row.json", tmp_path / "none.json")
    assert code == 1
    assert "predictions: expected one for every question, 1 of 1 missing: a; predict them too" in err
    (tmp_path / "answers.json").write_text('{"a": "Huygens"}')
    call = ("evaluate", tmp_path / "row.json", tmp_path / "answers.json", "--null-odds", tmp_path / "none.json")
    assert "null odds: expected a number for every question, 1 of 1 missing: a; give" in lamella(*call)[2]


def test_answerability_is_decided_at_the_threshold(run_folder: Path, lamella: Any, tmp_path: Path) -> None:
    strict = ("--set", "decoding.null_score_diff_threshold=-1000", "--set", "training.max_steps=0")
    assert lamella("train", run_folder / "config.json", "--out", tmp_path / "run", *strict)[0] == 0
    results = read_json(tmp_path / "run" / "eval_results.json")
    assert results["NoAns_exact"] == 100
    assert results["answerability_accuracy"] == pytest.approx(100 * results["NoAns_total"] / results["total"])


def test_parts_lists_every_part(lamella: Any) -> None:
    code, out, _ = lamella("parts", "--json")
    assert code == 0
    listing = {family["family"]: [part["name"] for part in family["parts"]] for family in json.loads(out)["families"]}
    assert {"frozen", "full", "adapter", "lora"} <= set(listing["tuning"])
    assert "last" in listing["mixer"]
    text = lamella("parts", "schedule")[1]
    assert "warmup" in text
    assert "mixer" not in text


def test_version_names_the_libraries(lamella: Any) -> None:
    code, out, _ = lamella("--version")
    assert code == 0
    assert "torch" in out
    assert "transformers" in out


DATA = ["--set", "data.train=demo:train"]
MISTAKES: dict[str, tuple[list[Any], int, str]] = {
    "no such run file": (["train", "nowhere.toml", "--out", "run"], 2, "nowhere.toml"),
    "no such data": (["check", "nowhere.json"], 2, "nowhere.json"),
    "no such bundled data": (["check", "demo:tran"], 2, "demo:train"),
    "no such family": (["parts", "mixers"], 2, "mixer"),
    "no such model": (["ask", "Who?", "--context", "text.txt", "--model", "nowhere"], 2, "nowhere"),
    "nobody's home": (["check", "~no-such-user/x.json"], 2, "~no-such-user/x.json"),
    "an endless number": (["train", "good.toml", "--out", "run", "--set", f"training.epochs={'9' * 5000}"], 2, "size"),
    "a bottomless file": (["evaluate", "demo:dev", "deep.json"], 2, "deep.json"),
    "out without a model": (["evaluate", "demo:dev", "list.json", "--out", "run"], 2, "--out"),
    "fix to a strange name": (["check", "demo:dev", "--fix-to", "out.csv"], 2, ".jsonl"),
    "the old option to fix": (["check", "demo:dev", "--fix", "out.json"], 2, "expected --fix-to OUT"),
    "no such context": (["ask", "Who?", "--context", "nowhere.txt", "--model", "nowhere"], 2, "nowhere.txt"),
    "no question": (["ask", " ", "-c", "text.txt"], 2, "expected a question"),
    "no text": (["ask", "Who?", "-c", "blank.txt", "-c", "blank.txt"], 2, "white space in blank.txt, blank.txt."),
    "blank text": (["ask", "Who?", "--text", " "], 2, "white space in --text."),
    "standard input twice": (["ask", "Who?", "-c", "-", "-c", "-"], 2, "only once"),
    "a text for a context": (["ask", "Who?", "-c", "It was Huygens."], 2, "or the text itself with --text."),
    "no context": (["ask", "Who?"], 2, "give --in DIR, --context FILE (- for standard input) or --text TEXT."),
    "a folder for a context": (["ask", "Who?", "-c", "."], 2, "--in reads folders."),
    "a long text for a context": (
        ["ask", "Who?", "-c", "It was\nhe. " * 999],
        2,
        f"'{'It was he. ' * 5}It wa…': cannot",
    ),
    "neither predictions nor model": (["evaluate", "demo:dev"], 2, "--model"),
    "both predictions and model": (["evaluate", "demo:dev", "text.txt", "--model", "x"], 2, "--model"),
    "model without out": (["evaluate", "demo:dev", "--model", "x"], 2, "--out"),
    "broken predictions": (["evaluate", "demo:dev", "broken.json"], 2, "broken.json:1:2"),
    "predictions of another type": (["evaluate", "demo:dev", "list.json"], 2, "list.json"),
    "broken run file": (["train", "broken.json", "--out", "run"], 2, "broken.json"),
    "unknown option": (["train", "good.toml", "--out", "run", "--set", "training.epoch=3"], 2, "epochs"),
    "out is a file": (["train", "good.toml", "--out", "text.txt", *DATA], 1, "text.txt"),
    "out holds other things": (["train", "good.toml", "--out", ".", *DATA], 1, "choose another --out"),
    "no train data": (["train", "good.toml", "--out", "run"], 2, "data.train"),
    "no network": (
        ["train", "good.toml", "--out", "run", *DATA, "--set", "encoder.name=some/where"],
        1,
        "hub",
    ),
    "unwritable target": (["convert", "demo:dev", "text.txt/out.json"], 1, "text.txt"),
    "unknown format": (["convert", "demo:dev", "out.json", "--to", "sqad"], 2, "squad"),
    "unknown encoder to count with": (["check", "demo:dev", "--encoder", "some/where"], 1, "some/where"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_clear_line(
    name: str, lamella: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, expected, hint = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "broken.json").write_text("{broken")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "good.toml").write_text("")
    before = sorted(os.listdir(tmp_path))
    code, _, err = lamella(*arguments)
    assert code == expected, err
    assert hint in err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line]
    assert len(lines) <= 2, err  # a run file's problems come below a headline
    assert [name for name in sorted(os.listdir(tmp_path)) if name not in before] in ([], ["run"])


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lamella", "evaluate", "demo:dev", "nowhere.json", "--debug"]
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" in failed.stderr
    assert failed.returncode == 2  # as without it


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("CUDA error: out of memory\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1", "CUDA_VISIBLE_DEVICES"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.", "stop other"),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", None),
    ],
)
def test_a_device_without_room_for_the_weights_gets_one_line(
    message: str,
    advice: str | None,
    encoder: Path,
    empty_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As PyTorch reports a GPU that other programs have filled; any other error of the library keeps its traceback."""

    def full(model: object, device: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr("lamella.training.prepare.ReaderModel.to", full)
    options = settings(f"encoder.name={encoder}")
    monkeypatch.setattr(sys, "argv", ["lamella", "train", str(empty_config), "--out", str(tmp_path / "run"), *options])
    if advice is None:
        with pytest.raises(RuntimeError, match="cuDNN"):
            main()
        return
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("lamella: out of memory: the model does not fit into what is left; stop other programs")
    assert advice in last
    assert ("CUDA" in last) == ("CUDA" in message)


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m lamella check demo:dev | true"  # `true` has ended before the command writes
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
