"""The demo's workload: a few applications, each with a system prompt of its own and several conversations.

An application's conversations take turns one after the other; the applications run at the same time. So requests do
overlap, but never two that share a prefix, and what an engine holds when a request arrives is what it held when the
request was routed: the prediction can be compared with the engine's own count, token by token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

TOPICS = (
    "bills of a mobile phone", "recipes for a small kitchen", "travel by train", "the care of house plants",
    "a first course in statistics", "repairs of an old bicycle", "history of the printing press", "birds of the north",
)  # fmt: skip
VERBS = ("explain", "compare", "summarise", "list", "check", "rewrite", "describe", "estimate", "translate", "review")
THINGS = (
    "the monthly invoice", "a late payment", "two cheap options", "the opening hours", "a broken chain",
    "the second chapter", "an unknown term", "the weather next week", "three typical mistakes", "the safest way",
    "a short answer", "the main cause",
)  # fmt: skip
HOWS = (
    "in plain words",
    "for a beginner",
    "step by step",
    "in two sentences",
    "with an example",
    "without any jargon",
    "once more",
)


@dataclass(slots=True)
class Conversation:
    """One user's chat: the messages so far, and what will be asked."""

    name: str
    messages: list[dict[str, str]]
    questions: list[str]
    turn: int = 0

    def ask(self) -> list[dict[str, str]]:
        """Adds the next question; returns the whole prompt."""
        self.messages.append({"role": "user", "content": self.questions[self.turn]})
        self.turn += 1
        return list(self.messages)

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


@dataclass(slots=True)
class Application:
    """Conversations under one system prompt, and the order in which they speak."""

    name: str
    conversations: list[Conversation]
    order: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Conversation]:
        return (self.conversations[index] for index in self.order)


def workload(
    *,
    applications: int = 4,
    conversations: int = 4,
    turns: int = 5,
    system_words: int = 120,
    document_words: int = 500,
    question_words: int = 30,
    seed: int = 7,
) -> list[Application]:
    """The same one for the same arguments. Its size in requests is applications x conversations x turns.

    A conversation begins with a document to talk about, so that most of its prompt is its own. A word is 2 tokens.
    """
    rng = random.Random(seed)
    result = []
    for number in range(applications):
        letter = chr(ord("A") + number)
        topic = TOPICS[number % len(TOPICS)]
        system = f"Application {number}. You answer questions about {topic}. " + _sentences(rng, system_words)
        chats = []
        for chat in range(conversations):
            questions = [_sentences(rng, question_words) for _ in range(turns)]
            questions[0] = _sentences(rng, document_words) + "\n\n" + questions[0]
            chats.append(Conversation(f"{letter}{chat + 1}", [{"role": "system", "content": system}], questions))
        order = [chat for chat in range(conversations) for _ in range(turns)]
        rng.shuffle(order)
        result.append(Application(letter, chats, order))
    return result


def _sentences(rng: random.Random, words: int) -> str:
    text: list[str] = []
    while len(text) < words:
        sentence = f"Please {rng.choice(VERBS)} {rng.choice(THINGS)} of case {rng.randrange(1000)} {rng.choice(HOWS)}."
        text += sentence.split()
    return " ".join(text)
