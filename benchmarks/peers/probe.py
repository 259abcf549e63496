"""Try what one tool offers for extractive question answering, inside that tool's own environment.

    python probe.py TOOL MODEL TEXT SQUAD

MODEL is a question answering checkpoint of transformers, TEXT a text file about Titan, SQUAD a file in the official
format. Every probe calls the tool and reports what came out or the exception it raised, as one line of JSON.
`features.py` creates the environments and calls this script.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSWERABLE, UNANSWERABLE = "When did the probe land on Titan?", "Who painted the Mona Lisa?"
EXPECTED = "14 January 2005"
Finding = tuple[bool, str]


def main() -> None:
    tool, *paths = sys.argv[1:]
    findings = {}
    for name, probe in TOOLS[tool].items():
        try:
            works, seen = probe(*paths)
        except Exception as error:
            works, seen = False, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        findings[name] = {"works": works, "seen": seen}
    packages = (
        "lamella",
        "transformers",
        "torch",
        "adapters",
        "peft",
        "haystack-ai",
        "transformers-haystack",
        "datasets",
    )
    print(json.dumps({"versions": {name: version for name in packages if (version := _version(name))}, **findings}))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


# Lamella


def ask_lamella(model: str, text: str, squad: str) -> Finding:
    from lamella import Reader

    answer = Reader.load(model).ask(ANSWERABLE, _read(text))[0]["answer"]
    return answer == EXPECTED, f"answer {answer!r}"


def abstain_lamella(model: str, text: str, squad: str) -> Finding:
    from lamella import Reader

    answers = Reader.load(model).ask(UNANSWERABLE, _read(text))
    return answers.no_answer, f"no_answer {answers.no_answer}, na_prob {answers.na_prob:.2f}"


def read_squad_lamella(model: str, text: str, squad: str) -> Finding:
    import lamella

    count = len(lamella.load_examples(squad).examples)
    return count > 0, f"{count} questions"


def score_lamella(model: str, text: str, squad: str) -> Finding:
    import lamella

    answers = {example.id: "" for example in lamella.load_examples(squad).examples}
    return True, f"f1 {lamella.evaluate(answers, squad)['f1']:.1f} without any answer"


def tune_lamella(tuning: str) -> Callable[..., Finding]:
    def probe(model: str, text: str, squad: str) -> Finding:
        from lamella import ReaderModel, RunConfig
        from lamella.models.base_encoder import load_encoder

        config = RunConfig.model_validate({"encoder": {"name": model, "tuning": tuning}})
        reader = ReaderModel(load_encoder(model), config)
        count = sum(value.numel() for value in reader.parameters() if value.requires_grad)
        return count > 0, f"{count:,} trainable parameters"

    return probe


# transformers


def ask_pipeline(model: str, text: str, squad: str) -> Finding:
    from transformers import pipeline

    answer = pipeline("question-answering", model=model, device="cpu")(question=ANSWERABLE, context=_read(text))
    return answer["answer"] == EXPECTED, f"answer {answer['answer']!r}"


def abstain_pipeline(model: str, text: str, squad: str) -> Finding:
    from transformers import pipeline

    ask = pipeline("question-answering", model=model, device="cpu")
    answer = ask(question=UNANSWERABLE, context=_read(text), handle_impossible_answer=True)
    return answer["answer"] == "", f"answer {answer['answer']!r} with handle_impossible_answer"


def read_squad_transformers(model: str, text: str, squad: str) -> Finding:
    from transformers.data.processors.squad import SquadV2Processor

    count = len(SquadV2Processor().get_dev_examples(str(Path(squad).parent), Path(squad).name))
    return count > 0, f"{count} questions"


def score_transformers(model: str, text: str, squad: str) -> Finding:
    from transformers.data.metrics.squad_metrics import squad_evaluate
    from transformers.data.processors.squad import SquadV2Processor

    examples = SquadV2Processor().get_dev_examples(str(Path(squad).parent), Path(squad).name)
    scores = squad_evaluate(examples, {example.qas_id: "" for example in examples})
    return True, f"f1 {scores['f1']:.1f} without any answer"


def read_squad_datasets(model: str, text: str, squad: str) -> Finding:
    """Load the file with the call that run_qa.py makes for `--train_file`."""
    from datasets import load_dataset

    columns = load_dataset("json", data_files={"train": squad}, field="data")["train"].column_names
    return {"question", "context", "answers"} <= set(columns), f"columns {', '.join(columns)}"


# adapters


def ask_adapters(model: str, text: str, squad: str) -> Finding:
    from adapters import AutoAdapterModel
    from transformers import AutoTokenizer, pipeline

    loaded, tokenizer = AutoAdapterModel.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ask = pipeline("question-answering", model=loaded, tokenizer=tokenizer, device="cpu")
    answer = ask(question=ANSWERABLE, context=_read(text))
    return answer["answer"] == EXPECTED, f"answer {answer['answer']!r} from the pipeline of transformers"


def tune_adapters(config: str) -> Callable[..., Finding]:
    def probe(model: str, text: str, squad: str) -> Finding:
        from adapters import AutoAdapterModel

        loaded = AutoAdapterModel.from_pretrained(model)
        loaded.add_adapter("probe", config=config)
        loaded.train_adapter("probe")
        count = sum(value.numel() for value in loaded.parameters() if value.requires_grad)
        return count > 0, f"{count:,} trainable parameters with {config!r}"

    return probe


# peft


def ask_peft(model: str, text: str, squad: str) -> Finding:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer, pipeline

    loaded = AutoModelForQuestionAnswering.from_pretrained(model)
    tuned = get_peft_model(loaded, LoraConfig(task_type="QUESTION_ANS", target_modules=["query", "value"]))
    ask = pipeline("question-answering", model=tuned, tokenizer=AutoTokenizer.from_pretrained(model), device="cpu")
    answer = ask(question=ANSWERABLE, context=_read(text))
    return answer["answer"] == EXPECTED, f"answer {answer['answer']!r}"


def lora_peft(model: str, text: str, squad: str) -> Finding:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForQuestionAnswering

    loaded = AutoModelForQuestionAnswering.from_pretrained(model)
    tuned = get_peft_model(loaded, LoraConfig(task_type="QUESTION_ANS", target_modules=["query", "value"]))
    count = sum(value.numel() for value in tuned.parameters() if value.requires_grad)
    return count > 0, f"{count:,} trainable parameters"


def bottleneck_peft(model: str, text: str, squad: str) -> Finding:
    from peft import PeftType

    methods = [method.value for method in PeftType]
    matches = [method for method in methods if any(word in method for word in ("BOTTLENECK", "HOULSBY", "PFEIFFER"))]
    return bool(matches), f"{', '.join(matches) or 'none'} among {len(methods)} methods"


# Haystack


def _haystack(model: str, text: str, question: str) -> list[Any]:
    from haystack import Document
    from haystack.utils import ComponentDevice
    from haystack_integrations.components.readers.transformers import TransformersExtractiveReader

    reader = TransformersExtractiveReader(model=model, device=ComponentDevice.from_str("cpu"))
    reader.warm_up()
    return list(reader.run(query=question, documents=[Document(content=_read(text))], top_k=3)["answers"])


def ask_haystack(model: str, text: str, squad: str) -> Finding:
    answer = _haystack(model, text, ANSWERABLE)[0]
    return answer.data == EXPECTED, f"answer {answer.data!r}, score {answer.score:.2f}"


def abstain_haystack(model: str, text: str, squad: str) -> Finding:
    answers = _haystack(model, text, UNANSWERABLE)
    ranked = sorted(answers, key=lambda answer: -answer.score)
    return ranked[0].data is None, ", ".join(f"{answer.data!r} {answer.score:.2f}" for answer in ranked)


Probes = dict[str, Callable[[str, str, str], Finding]]
PIPELINE: Probes = {
    "answers": ask_pipeline,
    "abstains": abstain_pipeline,
    "reads_squad": read_squad_transformers,
    "scores": score_transformers,
}
TOOLS: dict[str, Probes] = {
    "lamella": {
        "answers": ask_lamella,
        "abstains": abstain_lamella,
        "reads_squad": read_squad_lamella,
        "scores": score_lamella,
        "adapters": tune_lamella("adapter"),
        "lora": tune_lamella("lora"),
    },
    "transformers-4": PIPELINE,
    "transformers-5": PIPELINE,
    "run-qa-loader": {"reads_squad": read_squad_datasets},
    "adapters": {"answers": ask_adapters, "adapters": tune_adapters("double_seq_bn"), "lora": tune_adapters("lora")},
    "peft": {"answers": ask_peft, "adapters": bottleneck_peft, "lora": lora_peft},
    "haystack": {"answers": ask_haystack, "abstains": abstain_haystack},
}


if __name__ == "__main__":
    main()
