"""What the demo learns: kinds of documents, and how often each comes."""

import re
from random import Random

import chats
import config
import facts
import stories
import tools
from dialect import Parts, last_reply, plain, whole_timeline


def chat(rng: Random, messages: list[chats.Message], declared: list[tools.Schema] | None = None) -> Parts:
    """Turn a conversation into a document, in one of the two forms that occur at run time."""
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if rng.random() < 0.5 and len(replies) > 1:
        return whole_timeline(messages, declared)
    return last_reply(rng, messages, declared, replies[-1] if rng.random() < 0.5 else rng.choice(replies))


def raw_story(rng: Random) -> Parts:
    """A story as plain text; some begin in the middle, so that any opening reads well."""
    told = stories.story(rng)
    text = told.text
    if rng.random() < 0.05:
        text = f"{stories.request(rng, told)}\n\n{text}"
    elif rng.random() < 0.15:
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
        text = " ".join(sentences[rng.randrange(min(4, len(sentences))) :])
    return plain(text)


def raw_facts(rng: Random) -> Parts:
    """Plain statements, and questions with answers, as text without chat marks."""
    pairs = [facts.fact(rng) for _ in range(rng.randrange(1, 5))]
    pairs = [pair for pair in pairs if pair[1] != facts.UNKNOWN] or [facts.capital(rng)]
    form = rng.randrange(3)
    if form == 0:
        text = " ".join(answer for _, answer in pairs if not answer.startswith(("Yes", "No"))) or pairs[0][1]
    elif form == 1:
        text = "\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in pairs)
    else:
        text = "\n".join(chats.talk(rng) if rng.random() < 0.4 else pairs[0])
    return plain(text)


def tool_chat(rng: Random) -> Parts:
    """A conversation with tools."""
    messages, declared = tools.conversation(rng)
    return chat(rng, messages, declared)


_KINDS = {
    "story": (raw_story, 30),
    "statement": (raw_facts, 6),
    "chat-story": (lambda rng: chat(rng, chats.tale(rng)), 12),
    "chat-fact": (lambda rng: chat(rng, chats.single(rng)), 24),
    "chat-memory": (lambda rng: chat(rng, chats.memory(rng)), 8),
    "chat-follow-up": (lambda rng: chat(rng, chats.follow_up(rng)), 4),
    "chat-style": (lambda rng: chat(rng, chats.styled(rng)), 5),
    "chat-mixed": (lambda rng: chat(rng, chats.mixed(rng)), 7),
    "chat-copy": (lambda rng: chat(rng, chats.repeated(rng)), 0),
    "tools": (tool_chat, 18),
}
KINDS = {kind: (make, getattr(config, "SHARES", {}).get(kind, often)) for kind, (make, often) in _KINDS.items()}
"""Kind of document -> its maker, and how often it comes against the others."""
