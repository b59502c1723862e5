"""Log probabilities of a prompt in vLLM's format: one entry per token."""

from collections.abc import Sequence

from apt_jax.request import Logprob, PromptLogprobs
from apt_jax.text.tokenizer import Tokenizer


def prompt_entries(
    token_ids: Sequence[int], logprobs: PromptLogprobs, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    """Return one entry per token of a prompt: the token itself, then the most likely tokens at its position.

    It takes a few microseconds per log probability: call it outside of event loops if the prompt may be long.

    Args:
        token_ids: tokens of the prompt.
        logprobs: log probabilities of all tokens but the first, whose entry is None.
        tokenizer: decodes tokens as continuations of the text before them; None: tokens have no text.
    """

    def token_text(token_id: int, after: int | None) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id, after)

    special_ids = frozenset() if tokenizer is None else tokenizer.special_ids
    after: int | None = None
    entries: list[dict[int, Logprob] | None] = [None]
    own = zip(token_ids[:-1], token_ids[1:], logprobs.logprob.tolist(), logprobs.rank.tolist(), strict=True)
    tops = zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
    for (before, token_id, logprob, rank), (ids, values) in zip(own, tops, strict=True):
        after = after if before in special_ids else before
        entry = {token_id: Logprob(logprob=logprob, rank=rank, decoded_token=token_text(token_id, after))}
        for place, (top_id, value) in enumerate(zip(ids, values, strict=True), 1):
            if top_id != token_id:
                entry[top_id] = Logprob(logprob=value, rank=place, decoded_token=token_text(top_id, after))
        entries.append(entry)
    return entries
