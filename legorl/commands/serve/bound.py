"""Refuse a prompt that cannot fit before it is rendered: to tokenise ten megabytes takes longer than others can wait.

    if size_of_body > MOST_PER_TOKEN * context: least_tokens(tokenizer, request, enough=context)

The text of the messages is counted slice by slice, and only until it is more than enough; so the cost is that of the
context, not of the body. It is a lower bound of the prompt's tokens: markup of the template is left out, a slice that
ends within a word counts few tokens too many, and tools, which some templates shorten, count half.
"""

import json
from collections.abc import Iterator
from typing import Any

from legorl.commands.serve.turn import Request

MOST_PER_TOKEN = 8  # bytes; text of longer tokens is rare
SLICE = 1 << 16  # characters
SLACK = 16  # tokens that cutting a slice may add


def least_tokens(tokenizer: Any, request: Request, enough: int) -> int:
    """Return a lower bound of the prompt's tokens, counted until it is more than `enough`."""
    tokens = 0
    for text, share in _texts(request):
        for start in range(0, len(text), SLICE):
            ids = tokenizer(text[start : start + SLICE], add_special_tokens=False)["input_ids"]
            tokens += max(0, len(ids) - SLACK) // share
            if tokens > enough:
                return tokens
    return tokens


def _texts(request: Request) -> Iterator[tuple[str, int]]:
    for message in request.messages:
        yield message["content"].strip(), 1
    for tool in request.tools:
        yield json.dumps(tool, ensure_ascii=False), 2
