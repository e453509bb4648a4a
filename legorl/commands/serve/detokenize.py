"""Sampled ids to text, piece by piece: whole characters only, nothing of a stop string.

Special tokens are left out of the text unless the model marks tool calls or reasoning with them; a character that spans
several tokens is held back until it is whole; text that could be the start of a stop string is held back until it is
not. Nothing else is changed: the clean-up of white space that some tokenizers ask for would change arguments.
"""

from typing import Any


class Detokenizer:
    """`push` ids as they arrive; it returns the text that may be shown now.

    `hidden` are the ids that are no text (hidden_tokens); by default every special token.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), hidden: frozenset[int] | None = None):
        self._tokenizer = tokenizer
        self._stop = stop
        self._hidden = hidden_tokens(tokenizer) if hidden is None else hidden
        self._ids: list[int] = []
        self._read = 0  # ids whose text is final
        self._held = ""
        self.stopped: str | None = None  # the stop string that ended the text

    def push(self, ids: list[int], last: bool = False) -> str:
        """Return new text; `last` releases whatever was held back (an unfinished character becomes U+FFFD)."""
        self._ids += [i for i in ids if i not in self._hidden]
        self._held += self._decode(last)
        return self._release(last)

    def _decode(self, last: bool) -> str:
        # Decoding from a few ids back keeps the spaces that some tokenizers put only between words.
        start = max(0, self._read - 4)
        before = self._text(self._ids[start : self._read])
        whole = self._text(self._ids[start:])
        if whole.endswith("\ufffd") and not last:
            return ""
        self._read = len(self._ids)
        return whole[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _release(self, last: bool) -> str:
        if self.stopped is not None:
            self._held = ""
            return ""
        cuts = [(self._held.index(s), s) for s in self._stop if s in self._held]
        if cuts:
            at, self.stopped = min(cuts)
            piece, self._held = self._held[:at], ""
            return piece
        keep = 0 if last else max((overlap(self._held, s) for s in self._stop), default=0)
        piece = self._held[: len(self._held) - keep]
        self._held = self._held[len(piece) :]
        return piece


def hidden_tokens(tokenizer: Any, marks: tuple[str, ...] = ()) -> frozenset[int]:
    """Ids of the special tokens that are no text: how a model begins and ends, not `marks` of what it writes."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    return frozenset(i for i in special if tokenizer.convert_ids_to_tokens(i) not in marks)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


def tokens_through(tokenizer: Any, ids: list[int], mark: str) -> int:
    """Return how many of `ids` it takes until their text holds `mark`; all of them if it never does."""
    known = tokenizer.convert_tokens_to_ids(mark)
    if known in ids and tokenizer.convert_ids_to_tokens(known) == mark:  # else the id of unknown tokens
        return ids.index(known) + 1
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if mark in tokenizer.decode(ids[:middle]) else (middle + 1, high)
    return low
