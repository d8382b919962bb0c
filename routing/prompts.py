"""From an OpenAI request to the chain of its prompt's blocks.

Owns: which way a prompt is named, and the memory of prompts seen. Must not know: engines, choices,
HTTP (it is given a function that asks an engine to tokenise).

A router must know a prompt's blocks before the engine has seen it, and an engine names blocks by
token ids behind its chat template. Three ways, the best that there is:

- `tokens`: the request has token ids (`prompt: [1, 2, …]`). Exact, and free.
- `tokenize`: an engine is asked (`POST /tokenize`, which vLLM serves): its own tokenizer and chat
  template, so exact, too; a round trip, and the text is tokenised twice. The answers to the last
  prompts are remembered.
- `text`: where no engine answers in time. Blocks are runs of the text's bytes, and stand for what
  was sent where; no event can confirm or end them, so they are believed for as long as `expect_s`
  says. A prefix that differs in text differs in tokens; the reverse need not be true, and costs a
  hit.

Others do this in one way: Dynamo's and llm-d's routers carry tokenizers of their own, which must be
the engine's, template and all; SGLang's keeps a tree of texts, which no event can correct.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import xxhash
from kvcast.routing.core.hashing import text_chain, token_chain
from kvcast.routing.core.router import Prompt

BYTES_PER_TOKEN: Final = 4
"""How long a token's text is taken for, where it is not known: English, roughly."""
REMEMBERED_PROMPTS: Final = 1024
REMEMBERED_TOKENS: Final = 2_000_000
"""Of all remembered prompts together; beyond either, the oldest is forgotten."""
_MAX_TOKEN: Final = 0xFFFFFFFF
_TEMPLATE_FIELDS: Final = (
    "model",
    "prompt",
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
"""What decides a prompt's tokens; these are what /tokenize is asked with."""

Tokenize = Callable[[dict[str, Any]], Awaitable[Sequence[int] | None]]
"""Asks an engine for the token ids of such a request; None if it did not answer."""


class PromptError(ValueError):
    """A request whose prompt cannot be read; says why."""


@dataclass(frozen=True)
class Names:
    """How a model's prompts are named: tokens a block, its LoRA adapter if it is one, the seed of
    the hashes."""

    block_tokens: int
    lora_name: str | None = None
    seed: int = 0


class Prompts:
    """Names prompts. `tokenize` may be None: then all texts are named as texts."""

    def __init__(self, tokenize: Tokenize | None) -> None:
        self._tokenize = tokenize
        self._remembered: dict[int, Sequence[int]] = {}
        self._tokens = 0
        self.counts: Counter[str] = Counter()

    async def named(self, body: Mapping[str, Any], names: Names) -> Prompt:
        """The prompt of a request's body; PromptError if it has none. Of a list of prompts, the
        first decides."""
        salt = body.get("cache_salt")
        if not (salt is None or isinstance(salt, str)):
            raise PromptError("cache_salt is no text")
        tokens, text = _prompt_of(body)
        if tokens is None:
            tokens = await self._asked(body)
        if tokens is None:
            self.counts["by_text_total"] += 1
            return _by_text(text, salt, names)
        self.counts["by_tokens_total"] += 1
        chain = token_chain(
            tokens,
            names.block_tokens,
            lora_name=names.lora_name,
            cache_salt=salt,
            seed=names.seed,
        )
        return Prompt(chain, max(1, len(tokens)), names.block_tokens)

    async def _asked(self, body: Mapping[str, Any]) -> Sequence[int] | None:
        if self._tokenize is None:
            return None
        question = {name: body[name] for name in _TEMPLATE_FIELDS if name in body}
        if isinstance(question.get("prompt"), list):
            question["prompt"] = question["prompt"][0]
        digest = xxhash.xxh3_64_intdigest(msgspec.json.encode(question, order="sorted"))
        known = self._remembered.get(digest)
        if known is not None:
            self.counts["remembered_total"] += 1
            return known
        tokens = await self._tokenize(question)
        if tokens is None:
            self.counts["tokenize_failed_total"] += 1
            return None
        if not _are_tokens(tokens):
            self.counts["tokenize_failed_total"] += 1
            return None
        self._remember(digest, tokens)
        return tokens

    def _remember(self, digest: int, tokens: Sequence[int]) -> None:
        if len(tokens) > REMEMBERED_TOKENS:
            return
        self._forget(digest)
        while self._remembered and (
            self._tokens + len(tokens) > REMEMBERED_TOKENS
            or len(self._remembered) >= REMEMBERED_PROMPTS
        ):
            self._forget(next(iter(self._remembered)))
        self._remembered[digest] = tokens
        self._tokens += len(tokens)

    def _forget(self, digest: int) -> None:
        self._tokens -= len(self._remembered.pop(digest, ()))


def body_of(raw: bytes) -> dict[str, Any]:
    """A request's body; PromptError if it is no JSON object."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptError(f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise PromptError("a request is a JSON object")
    return body


def _prompt_of(body: Mapping[str, Any]) -> tuple[Sequence[int] | None, bytes]:
    """A request's token ids, or else its text."""
    if "messages" in body:
        messages = body["messages"]
        if not isinstance(messages, list) or not messages:
            raise PromptError("messages must be a list of messages")
        shown = [_message(message) for message in messages]
        tools = body.get("tools")
        if tools:
            shown.insert(0, _json(tools))
        return None, b"\0".join(shown)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return None, prompt.encode(errors="surrogatepass")
    if isinstance(prompt, list) and prompt and _are_tokens(prompt):
        return prompt, b""
    raise PromptError("prompt must be a text, token ids, or a list of either")


def _message(message: object) -> bytes:
    if not isinstance(message, Mapping):
        raise PromptError("a message must be an object")
    role, content = message.get("role"), message.get("content")
    text = content.encode(errors="surrogatepass") if isinstance(content, str) else _json(content)
    return _json(role) + b"\0" + text


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _are_tokens(values: Sequence[object]) -> bool:
    return all(type(one) is int and 0 <= one <= _MAX_TOKEN for one in values)


def _by_text(text: bytes, salt: str | None, names: Names) -> Prompt:
    block_bytes = names.block_tokens * BYTES_PER_TOKEN
    seed = names.seed
    for part in (names.lora_name, salt):
        if part is not None:
            seed = xxhash.xxh3_64_intdigest(part.encode(errors="surrogatepass"), seed)
    chain = text_chain([text], block_bytes, seed=seed)
    return Prompt(chain, max(1, len(text) // BYTES_PER_TOKEN), names.block_tokens)
