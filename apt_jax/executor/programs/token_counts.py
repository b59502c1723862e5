"""The host's record of the tokens that the device has counted for penalties, which lets a step send only new tokens.
Uses NumPy only."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.executor.programs.block_tables import Changes

IN_PROMPT = 1 << 30
"""Amount added to the count of a token that is in the prompt; larger than any number of outputs."""

Ints = NDArray[np.int32]


class SentCounts:
    """The tokens of each slot that the device has counted after all dispatched steps have run.

    For each slot and token the device holds the number of occurrences in the outputs, plus `IN_PROMPT` if the token is
    in the prompt. All changes are increments; negative increments remove an earlier request's tokens from a slot.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._max_num_seqs, self._vocab_size = max_num_seqs, vocab_size
        self.clear()

    def clear(self) -> None:
        """Record that the device's counts are 0."""
        empty = np.zeros(0, np.int32)
        self._tokens: list[Ints] = [empty] * self._max_num_seqs  # with spare capacity
        self._lens, self._prompt_lens = [0] * self._max_num_seqs, [0] * self._max_num_seqs

    def take_changes(self, slots: Sequence[int], histories: Sequence[Ints], prompt_lens: Sequence[int]) -> Changes:
        """Return the changes that the device's counts need, and record them as sent.

        Args:
            slots: slots of the rows with penalties on token counts.
            histories: tokens of each row, prompt then outputs.
            prompt_lens: number of prompt tokens in each history.

        Returns:
            Indices into (max_num_seqs, V), and increments.
        """
        places, added = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        for slot, history, prompt_len in zip(slots, histories, prompt_lens, strict=True):
            tokens, more = self._changes(slot, history, prompt_len)
            places.append(tokens.astype(np.int64) + slot * self._vocab_size)
            added.append(more)
        if not places:
            return np.zeros((2, 0), np.int32)
        return np.stack([np.concatenate(places), np.concatenate(added)]).astype(np.int32)

    def _changes(self, slot: int, history: Ints, prompt_len: int) -> tuple[Ints, NDArray[np.int64]]:
        """Return the tokens of a slot whose counts change, and the increments."""
        num_sent, old = self._lens[slot], self._tokens[slot][: self._lens[slot]]
        grows = prompt_len == self._prompt_lens[slot] and prompt_len <= num_sent <= len(history)
        if grows and np.array_equal(history[:num_sent], old):
            new = history[num_sent:]
            found = new, np.ones(len(new), np.int64)
        else:
            before, after = _counts(old, self._prompt_lens[slot]), _counts(history, prompt_len)
            tokens, place = np.unique(np.concatenate([before[0], after[0]]), return_inverse=True)
            change = np.zeros(len(tokens), np.int64)
            np.add.at(change, place, np.concatenate([-before[1], after[1]]))
            found, num_sent = (tokens[change != 0], change[change != 0]), 0
        if len(history) > len(self._tokens[slot]):
            room = np.empty(2 * len(history), np.int32)
            room[:num_sent] = old[:num_sent]
            self._tokens[slot] = room
        self._tokens[slot][num_sent : len(history)] = history[num_sent:]
        self._lens[slot], self._prompt_lens[slot] = len(history), prompt_len
        return found

    def check(self, on_device: Ints) -> None:
        """Check the device's counts against this record.

        Raises:
            RuntimeError: they differ.
        """
        for slot, length in enumerate(self._lens):
            expected = np.zeros(self._vocab_size, np.int64)
            np.add.at(expected, *_counts(self._tokens[slot][:length], self._prompt_lens[slot]))
            if not np.array_equal(expected, on_device[slot]):
                raise RuntimeError(f"the token counts on the device are wrong in slot {slot}")


def _counts(history: Ints, prompt_len: int) -> tuple[Ints, NDArray[np.int64]]:
    """Return the tokens of a history, in which a token may occur several times, and the increment for each."""
    prompt, outputs = np.unique(history[:prompt_len]), history[prompt_len:]
    ones = np.ones(len(outputs), np.int64)
    return np.concatenate([prompt, outputs]), np.concatenate([np.full(len(prompt), IN_PROMPT), ones])
