"""Reasons to doubt the answers to some questions: a script that the encoder cannot read, or a question cut short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Tokenizer

from lamella.config import WindowOptions
from lamella.data.windows.features import Features
from lamella.data.windows.tokens import Tokenizing, encodable, without_truncation
from lamella.errors import counted, warn
from lamella.languages.hangul import compose_hangul
from lamella.languages.scripts import SCRIPTS, main_script

UNKNOWN = ("[UNK]", "<unk>")  # of WordPiece, and of SentencePiece and byte-level vocabularies
MOST_UNKNOWN = 0.2  # share of the letters of a text that may lie in unknown tokens
FEWEST_LETTERS = 1.2  # per token: an encoder that learnt a script has tokens of several letters
FEWEST_PIECES = 1000  # tokens of the vocabulary with letters of a script, if the encoder learnt it
SMALL_VOCABULARY = 1 / 30  # the same as a share, for a small vocabulary


class Doubts:
    """Collects doubts while questions are answered, and warns once per reason at the end."""

    def __init__(self, tokenizer: Tokenizing, windows: WindowOptions) -> None:
        self._plain, self._windows = without_truncation(tokenizer), windows
        self._scripts = _Scripts(self._plain)
        self._unreadable: dict[str, dict[str, str | None]] = {"question": {}, "text": {}}  # per text: its script
        self._cut: dict[str, tuple[int, int]] = {}  # per question that was cut: its tokens, and how many were read

    def add(self, features: Features) -> None:
        """Judge the questions and contexts of some windows, each context by the window in its middle."""
        specials = len(features.template.prefix) + len(features.template.middle)
        room = min(self._windows.max_query_length, features.max_seq_length - features.template.special_tokens - 1)
        windows = features.example.searchsorted(range(len(features.examples)), side="left").tolist()
        for number, (example, first) in enumerate(zip(features.examples, windows, strict=True)):
            last = windows[number + 1] if number + 1 < len(windows) else len(features)
            if first == last:  # its windows are in the next slice
                continue
            may_be_cut = features.context_begin[first] - specials >= room
            self._judge_question(example.question, None if may_be_cut else _question_ids(features, first))
            self._judge_context(features, (first + last) // 2)
            if may_be_cut:
                tokens = len(
                    self._plain.encode(compose_hangul(encodable(example.question)), add_special_tokens=False).ids
                )
                if tokens > room:
                    self._cut[example.question] = (tokens, room)

    def warn(self) -> None:
        """Issue a warning for each reason."""
        for message in _messages(self._unreadable, self._cut):
            warn(message)

    def about(self, question: str, texts: Iterable[str]) -> list[str]:
        """Return the reasons to doubt the answers to one of the questions, which was asked about these texts."""
        asked = {"question": [question], "text": texts}
        unreadable = {kind: {text: self._unreadable[kind].get(text) for text in asked[kind]} for kind in asked}
        return _messages(unreadable, {question: self._cut[question]} if question in self._cut else {})

    def _judge_question(self, question: str, ids: Sequence[int] | None) -> None:
        """Judge a question by its token ids, if all of them are known."""
        judged = self._unreadable["question"]
        if question in judged or question.isascii():
            return
        composed = compose_hangul(encodable(question))
        if ids is not None and self._scripts.knows(ids):  # then it does not matter where they are
            judged[question] = self._scripts.unreadable(composed, ids, [(0, len(composed))] * len(ids))
            return
        encoding = self._plain.encode(composed, add_special_tokens=False)
        judged[question] = self._scripts.unreadable(composed, encoding.ids, encoding.offsets)

    def _judge_context(self, features: Features, window: int) -> None:
        number = features.example[window]
        context, judged = features.examples[number].context.text, self._unreadable["text"]
        if context in judged or context.isascii():
            return
        begin, end = features.context_begin[window], features.context_end[window]
        first, row = features.first_token[window], features.rows[window]
        ids = features.input_ids[row + begin : row + end].tolist()
        offsets = features.offsets[number][first : first + end - begin].tolist()
        judged[context] = self._scripts.unreadable(context, ids, offsets)


def _messages(unreadable: Mapping[str, Mapping[str, str | None]], cut: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return a message for each reason to doubt answers; the arguments are as in `Doubts`."""
    messages = []
    scripts = {script for texts in unreadable.values() for script in texts.values() if script}
    if scripts:
        found = [
            counted(count, kind)
            for kind, texts in unreadable.items()
            if (count := sum(script is not None for script in texts.values()))
        ]
        messages.append(
            f"the encoder cannot read the script ({', '.join(sorted(scripts))}) of {' and '.join(found)}, so the "
            "answers are unreliable; use a reader whose encoder was trained on that language."
        )
    if cut:
        tokens, read = max(cut.values())
        whole = f"of its {tokens:,}" if len(cut) == 1 else f"each, the longest of {tokens:,}"
        messages.append(
            f"{counted(len(cut), 'question')} cut to {read} tokens {whole}; ask a shorter question, or use a "
            "reader with a larger windows.max_query_length."
        )
    return messages


def _question_ids(features: Features, window: int) -> list[int]:
    """Return the tokens of the question of a window."""
    row, template = features.rows[window], features.template
    end = features.context_begin[window] - len(template.middle)
    ids: list[int] = features.input_ids[row + len(template.prefix) : row + end].tolist()
    return ids


class _Scripts:
    """Decides which scripts an encoder can read, by its tokenizer.

    Unknown tokens alone do not reveal a foreign script. The vocabulary of English BERT holds the single letters of most
    scripts, so Hebrew text has no unknown token, but a token for every letter, from which no word can be learnt. Hence
    a script is unreadable if its letters are unknown, or if it is split into letters and is rare in the vocabulary.
    The latter because an encoder of Chinese has tokens of one letter too.
    """

    def __init__(self, plain: Tokenizer) -> None:
        self._plain = plain
        self._unknown = {plain.token_to_id(token) for token in UNKNOWN} - {None}
        self._frequent: dict[str, bool] = {}  # per script

    def unreadable(self, text: str, ids: Sequence[int], offsets: Sequence[Sequence[int]]) -> str | None:
        """Return the script of some tokens of a text if it cannot be read."""
        if not ids:
            return None
        shown = text[offsets[0][0] : offsets[-1][1]]
        script = main_script(shown)
        knows = self.knows(ids)
        if knows and (script == "latin" or script not in SCRIPTS):  # most texts: their letters need no count
            return None
        letters = sum(map(str.isalpha, shown))
        if not knows:
            pairs = zip(ids, offsets, strict=True)
            hidden = [text[begin:end] for id, (begin, end) in pairs if id in self._unknown]
            if sum(map(str.isalpha, "".join(hidden))) > MOST_UNKNOWN * letters:
                return script
        split = script in SCRIPTS.keys() - {"latin"} and letters < FEWEST_LETTERS * len(ids)
        return script if split and not self._is_frequent(script) else None

    def knows(self, ids: Sequence[int]) -> bool:
        """Return whether no token of a text is unknown."""
        return self._unknown.isdisjoint(ids)

    def _is_frequent(self, script: str) -> bool:
        """Check whether many tokens of the vocabulary have letters of a script; never if the tokens are bytes."""
        if script not in self._frequent:
            vocabulary = self._plain.get_vocab()
            tokens = sum(1 for token in vocabulary if SCRIPTS[script].search(token))
            self._frequent[script] = tokens >= min(FEWEST_PIECES, SMALL_VOCABULARY * len(vocabulary))
        return self._frequent[script]
