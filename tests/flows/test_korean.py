"""Korean from the data file to the answer, on a tiny encoder like multilingual-e5-small: BERT, XLM-R tokenizer."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from lamella import Reader, runs
from lamella.data.file_formats.formats import read
from lamella.errors import LamellaWarning
from lamella.files import read_json
from lamella.plan import load_plan
from lamella.study.papers.page_text import read_texts
from lamella.study.papers.published_tables import read_paper
from lamella.testing.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "configs" / "study" / "korean"
pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [
    ("서울", "서울은 한국의 수도이고 한강이 흐른다.", "한국의 수도는?", "서울"),
    ("도쿄", "東京は日本, 도쿄는 일본의 수도이다.", "일본의 수도는?", "도쿄"),
    ("이순신", "임진왜란 때 이순신이 명량에서 이겼다.", "누가 이겼나?", "이순신"),
    ("한글", "세종은 1443년에 한글을 만들었다.", "언제 만들었나?", "1443년"),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_encoder(tmp_path_factory.mktemp("encoder") / "e5", max_position_embeddings=128)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    tiny_tokenizer("xlm-roberta").save_pretrained(folder)
    return folder


def write_korquad(path: Path, form: str = "NFC") -> Path:
    """Write a file as KorQuAD 1.0 is: nested, with one answer per question."""

    def text(value: str) -> str:
        return unicodedata.normalize(form, value)

    data = [
        {"title": text(title), "paragraphs": [{"context": text(context), "qas": [
            {"id": f"{number}-{copy}", "question": text(question), "answers": [
                {"text": text(answer), "answer_start": text(context).index(text(answer))}]}
            for copy in range(3)]}]}
        for number, (title, context, question, answer) in enumerate(TEXTS)
    ]  # fmt: skip
    path.write_text(json.dumps({"version": "KorQuAD_v1.0_dev", "data": data}, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "path", sorted(STUDY.glob("*/korquad-*.toml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_the_run_files_of_the_study_have_the_rows_of_the_paper(path: Path) -> None:
    plan = load_plan(path)
    published = {
        row.run_name for table in read_paper("korquad").table if table.run_file == path.stem for row in table.row
    }
    # All rows have batches of 24, and only the Korean encoder is compared with a multilingual one.
    absent = {"baseline-batch-16"} | ({"mbert"} if path.parent.name != "albert-kor" else set())
    assert published - set(plan.runs) <= absent
    for config in plan.runs.values():
        assert config.data.contexts_per_question == 3
        assert config.decoding.max_context_only
        if path.parent.name != "hotpot":
            assert config.windows.max_seq_length == 256  # the positions of albert-kor
    beyond = set(plan.runs) - published
    texts = read_texts([ROOT / "results" / "korean" / path.parent.name]).of("korquad")
    assert not beyond or any(section.baseline.startswith(f"{path.stem}/") for section in texts.beyond)


def test_a_tokenizer_that_is_only_a_vocabulary(lamella: Any, tmp_path: Path) -> None:
    """albert-kor has no tokenizer.json: transformers builds its tokenizer, also to count tokens."""
    folder = save_tiny_encoder(tmp_path / "albert-kor", "albert", max_position_embeddings=128)
    for file in folder.glob("*token*"):
        file.unlink()
    vocabulary = sorted(tiny_tokenizer("bert").get_vocab().items(), key=lambda entry: entry[1])
    (folder / "vocab.txt").write_text("\n".join(word for word, _ in vocabulary), encoding="utf-8")
    options = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "strip_accents": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    data = write_korquad(tmp_path / "ko.json", "NFD")
    code, out, err = lamella("check", data, "--encoder", folder, "--json")
    assert err == ""
    counted = json.loads(out)["statistics"][0]["tokens"]["scripts"]["hangul"]
    assert counted["unknown_rate"] < 1  # 서울은 and other composed syllables are in the vocabulary
    (tmp_path / "run.toml").write_text(f"[data]\ntrain = '{data}'\n[encoder]\nname = '{folder}'\n")
    _, of_run_file, err = lamella("check", tmp_path / "run.toml", "--json")
    assert json.loads(of_run_file)["statistics"] == json.loads(out)["statistics"]
    code, out, err = lamella("train", tmp_path / "run.toml", "--out", tmp_path / "run")
    assert (code, err) == (
        2,
        f"lamella: windows.max_seq_length: expected at most 128, the number of positions of {folder}, got 384.\n",
    )


RUN = """
[data]
train = "train.json"
dev = "dev.json"
contexts_per_question = 2
[windows]
max_seq_length = 64
doc_stride = 16
max_query_length = 16
[training]
max_steps = 2
batch_size = 4
metric = "question_f1"
"""


@pytest.mark.parametrize("tuning", ["full", "adapter"])
def test_from_korquad_to_an_answer(
    tuning: str, encoder: Path, lamella: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_korquad(tmp_path / "all.json", "NFD" if tuning == "full" else "NFC")
    split = ("--hold-out", 0.5, "--hold-out-to", "dev.json", "--multi-context", 2)
    code, out, err = lamella("convert", "all.json", "train.json", *split)
    assert (code, err) == (0, "")
    assert out.count("6 questions (0 fixed, 0 skipped), 12 contexts") == 2
    train, dev = (read(name).examples for name in ("train.json", "dev.json"))
    assert not {example.context.title for example in train} & {example.context.title for example in dev}

    (tmp_path / "run.toml").write_text(RUN)
    code, out, err = lamella(
        "train", "run.toml", "--out", "run", "--set", f"encoder.name={encoder}", "--set", f"encoder.tuning={tuning}"
    )
    assert (code, err) == (0, "")
    assert "of the tokens are unknown to the tokenizer of" in out  # the tiny vocabulary has few Korean words
    results = read_json(tmp_path / "run" / runs.RESULTS)
    assert (results["total"], results["question_total"]) == (12, 6)
    assert {"word_f1", "question_word_f1"} <= set(results)

    if tuning == "adapter":
        code, _, err = lamella("export", "run", "--onnx", "onnx")
        assert (code, err) == (0, "")
    context = unicodedata.normalize("NFD", TEXTS[2][1])
    for model in ("run", "onnx") if tuning == "adapter" else ("run",):
        with pytest.warns(LamellaWarning, match=r"cannot read the script \(hangul\)"):
            answers = Reader.load(model).ask(TEXTS[2][2], context, top_k=5)
        for answer in answers:
            if answer["answer"]:
                assert context[answer["start"] : answer["end"]] == answer["answer"]
                assert unicodedata.normalize("NFC", answer["answer"]) in TEXTS[2][1]  # no half of a syllable
