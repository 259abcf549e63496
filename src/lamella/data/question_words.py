"""Leave out the words of a question that a search should ignore."""

# Words of an English question that say little about its answer. In texts that are not written as questions, such as
# manuals, they are rare, and BM25 gives rare words much weight. Leaving them out raises the recall among the best 10 of
# 24,914 passages from 86.3 to 86.9 % (docs/decisions/0049-open-questions.md).
QUESTION_WORDS = {
    "a", "about", "an", "and", "are", "as", "at", "be", "been", "but", "by", "can", "could", "did", "do", "does",
    "for", "from", "had", "has", "have", "he", "her", "him", "his", "how", "I", "i", "if", "in", "into", "is", "it",
    "its",
    "may", "me", "might", "must", "my", "no", "not", "of", "on", "or", "our", "shall", "she", "should", "such",
    "that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "to", "was", "we", "were",
    "what", "when", "where", "which", "who", "whom", "whose", "why", "will", "with", "would", "you", "your",
}  # fmt: skip
PUNCTUATION = "?!.,;:\"'“”‘’()"


def content_words(question: str) -> str:
    """Return a question without its question words and auxiliaries, if it has other words."""
    words = [word for place, word in enumerate(question.split()) if not _is_question_word(word, first=place == 0)]
    return " ".join(words) or question


def _is_question_word(word: str, *, first: bool) -> bool:
    """Whether a word says little about the answer; capitals mark a name, as in WHO, IT, May and Will."""
    word = word.strip(PUNCTUATION)
    if first and (len(word) == 1 or not word.isupper()):
        word = word.lower()
    return word in QUESTION_WORDS
