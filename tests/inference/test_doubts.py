"""Warnings about answers that cannot be trusted: a foreign script, a question cut short, an unfinished run."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from lamella import LamellaWarning, Reader, runs
from lamella.data.examples import Context, Example
from lamella.data.windows.features import featurise_in_slices
from lamella.inference.doubts import Doubts, _Scripts
from samples import needs_torch

pytestmark = pytest.mark.usefixtures("one_thread")

SENTENCES = {
    "hangul": "타이탄은 토성의 위성 중 가장 큰 위성이며 1655년 크리스티안 하위헌스가 발견하였다.",
    "hebrew": "טיטאן הוא הירח הגדול ביותר של שבתאי, והתגלה בשנת 1655 על ידי כריסטיאן הויגנס.",
    "arabic": "تيتان هو أكبر أقمار كوكب زحل، اكتشفه كريستيان هوغنس عام 1655.",
    "kana": "タイタンは土星の第6衛星で最大の衛星である。1655年にクリスティアーン・ホイヘンスが発見した。",
    "han": "土卫六是土星最大的卫星，由荷兰天文学家惠更斯于1655年发现。",
    "cyrillic": "Титан — крупнейший спутник Сатурна, открытый Христианом Гюйгенсом в 1655 году.",
    "greek": "Ο Τιτάνας είναι ο μεγαλύτερος δορυφόρος του Κρόνου.",
    "devanagari": "टाइटन शनि का सबसे बड़ा चंद्रमा है, जिसकी खोज 1655 में हुई।",
    "thai": "ไททันเป็นดวงจันทร์ที่ใหญ่ที่สุดของดาวเสาร์",
}
READABLE = [
    "Titan is the largest moon of Saturn; Huygens saw it in 1655.",
    "Titan ist der größte Mond des Saturn und wurde 1655 von Christiaan Huygens entdeckt.",
    "Tytan – największy księżyc Saturna, odkryty w 1655 roku, miasto źródeł i żółwi.",
    "Titan là vệ tinh lớn nhất của Sao Thổ, được Christiaan Huygens phát hiện năm 1655.",
    "“Titan” costs 12 € — see §4, ∑ x² ≤ 3 ❤️ 🍕 🎉 🪐, says Θεία (Тейя, 테이아).",
    "❤️ 🍕 🎉",
    "1655 – 2005",
]


@pytest.fixture(scope="module")
def default() -> Reader:
    return Reader.load(device="cpu", precision="fp32")


@pytest.mark.parametrize("script", SENTENCES)
def test_a_script_that_the_encoder_cannot_read(script: str, default: Reader) -> None:
    with pytest.warns(LamellaWarning) as caught:
        default.ask("Who discovered Titan?", SENTENCES[script])
    (message,) = [str(warning.message) for warning in caught]
    assert message == (
        f"the encoder cannot read the script ({script}) of 1 text, so the answers are unreliable; use a reader whose "
        "encoder was trained on that language."
    )
    assert caught[0].filename == __file__


@pytest.mark.parametrize("text", READABLE)
def test_texts_that_it_can_read_give_no_warning(text: str, default: Reader) -> None:
    default.ask(["Who discovered Titan?", "Was kostet das Stück für Zoë?", "What is Θεία?"], text)


def test_questions_and_texts_are_counted_and_warned_of_once(default: Reader) -> None:
    contexts = [SENTENCES["hangul"], SENTENCES["hebrew"], READABLE[0]]
    for call in (lambda: default.ask(["누가?", "Who?"], [contexts, contexts]), lambda: default("누가?", contexts[0])):
        with pytest.warns(LamellaWarning) as caught:
            call()
        (message,) = [str(warning.message) for warning in caught]
        assert "of 1 question and " in message
    with pytest.warns(LamellaWarning, match=r"\(hangul, hebrew\) of 1 question and 2 texts,"):
        default.ask(["누가?", "Who?"], [contexts, contexts])


def test_each_question_of_a_list_has_its_own_warnings(default: Reader) -> None:
    questions = ["Who discovered Titan?", "Who found it? " * 30, "When?", "When was it?"]
    texts = [READABLE[0], READABLE[0], SENTENCES["hebrew"], [READABLE[1], SENTENCES["hangul"], SENTENCES["hebrew"]]]
    with pytest.warns(LamellaWarning) as together:
        answered = default.ask(questions, texts)
    assert [str(warning.message)[:23] for warning in together] == ["the encoder cannot read", "1 question cut to 64 to"]
    for question, text, answers in zip(questions, texts, answered, strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            alone = default.ask(question, text)
        assert answers.warnings == alone.warnings == tuple(str(warning.message) for warning in caught)
    assert [len(answers.warnings) for answers in answered] == [0, 1, 1, 1]


def test_long_texts_are_judged_by_their_middle(default: Reader) -> None:
    with pytest.warns(LamellaWarning, match="hebrew"):
        default.ask("Who?", f"{READABLE[0]} {SENTENCES['hebrew'] * 20} {READABLE[0]}")
    default.ask("Who?", f"{SENTENCES['hebrew']} {READABLE[0] * 60}")


def test_a_context_may_begin_at_the_end_of_a_slice(default: Reader) -> None:
    """The slice then holds its example without a window."""
    model = default.model
    contexts = [f"{READABLE[1] * 40}", SENTENCES["hebrew"]]
    examples = [Example(str(number), "Who?", Context(text)) for number, text in enumerate(contexts)]
    (whole,) = featurise_in_slices(examples, model.tokenizer, model.windows)
    doubts, empty = Doubts(model.tokenizer, model.windows), 0
    for features in featurise_in_slices(examples, model.tokenizer, model.windows, size=len(whole) - 1):
        empty += len(set(features.example.tolist())) < len(features.examples)
        doubts.add(features)
    assert empty == 1
    with pytest.warns(LamellaWarning, match="hebrew"):
        doubts.warn()


def scripts_of(tokens: list[str]) -> tuple[_Scripts, Tokenizer]:
    vocabulary = {token: number for number, token in enumerate(["[UNK]", *tokens])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _Scripts(tokenizer), tokenizer


def judged(scripts: _Scripts, tokenizer: Tokenizer, text: str) -> str | None:
    encoding = tokenizer.encode(text)
    return scripts.unreadable(text, encoding.ids, encoding.offsets)


def test_an_encoder_of_the_script_reads_it() -> None:
    """A Chinese vocabulary has a token for each character, as English BERT has for Hebrew letters; it has many more."""
    chinese = [chr(code) for code in range(0x4E00, 0x9FFF)]
    assert judged(*scripts_of(chinese), SENTENCES["han"]) is None
    few = sorted(set(SENTENCES["han"]))
    assert judged(*scripts_of([*few, *(f"word{number}" for number in range(30_000))]), SENTENCES["han"]) == "han"
    words = SENTENCES["cyrillic"].replace(",", "").split()
    assert judged(*scripts_of([*words, *(f"word{number}" for number in range(30_000))]), " ".join(words)) is None


def test_a_byte_level_encoder_has_no_unknown_token() -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert judged(_Scripts(tokenizer), tokenizer, SENTENCES["hebrew"]) == "hebrew"
    assert judged(_Scripts(tokenizer), tokenizer, READABLE[1]) is None


@needs_torch
def test_a_question_cut_short() -> None:
    from doubles import tiny_model

    reader = Reader(tiny_model(windows={"max_seq_length": 64, "doc_stride": 16, "max_query_length": 12}))
    tokenizer = reader.model.tokenizer.backend_tokenizer
    fits, long = "a b c d e f g h i j k l", "a b c d e f g h i j k l m"
    assert len(tokenizer.encode(fits, add_special_tokens=False).ids) == 12
    reader.ask(fits, "Titan is a moon.")
    advice = "; ask a shorter question, or use a reader with a larger windows.max_query_length."
    with pytest.warns(LamellaWarning) as caught:
        reader.ask([long, fits], "Titan is a moon.")
    assert [str(warning.message) for warning in caught] == [f"1 question cut to 12 tokens of its 13{advice}"]
    with pytest.warns(LamellaWarning) as caught:
        reader.ask([long, f"{long} n"], "Titan is a moon.")
    assert [str(warning.message) for warning in caught] == [
        f"2 questions cut to 12 tokens each, the longest of 14{advice}"
    ]
    reader(question=long, context="Titan is a moon.")  # the pipeline reads questions whole


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    from doubles import save_tiny_encoder, tiny_run_config
    from lamella.models.base_encoder import load_encoder
    from lamella.models.model import ReaderModel

    model = ReaderModel(load_encoder(str(save_tiny_encoder(tmp_path / "tiny"))), tiny_run_config())
    with suppress(OSError), runs.new_run(tmp_path / "run", "train") as folder:
        model.save(folder / "model")
        raise OSError("the disk is full")
    return tmp_path / "run"


@pytest.mark.parametrize("state", ["unfinished", "failed", "interrupted"])
def test_the_model_of_an_unfinished_run(state: str, unfinished: Path) -> None:
    record = unfinished / "run.json"
    record.write_text(record.read_text().replace('"failed"', f'"{state}"'))
    for name in (unfinished, unfinished / "model"):
        with pytest.warns(LamellaWarning) as caught:
            reader = Reader.load(name)
        assert [str(warning.message) for warning in caught] == [
            f"{unfinished}: the training run is {state}, so this is not its final model; continue it "
            "with lamella train … --resume."
        ]
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reader.ask("Who?", "Nobody.")  # the warning was given


def test_commands_print_each_warning_in_one_line(unfinished: Path, lamella: Any, tmp_path: Path) -> None:
    code, _, err = lamella("ask", "누가?", "--text", SENTENCES["hangul"], "--model", "default")
    assert code == 0
    assert err == (
        "warning: the encoder cannot read the script (hangul) of 1 question and 1 text, so the answers are "
        "unreliable; use a reader whose encoder was trained on that language.\n"
    )
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "Who?", "context": "Nobody.", "answers": []}\n')
    code, out, err = lamella("predict", data, "--model", unfinished, "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith(f"warning: {unfinished}: the training run is failed, so")
    assert "1 question" in out
