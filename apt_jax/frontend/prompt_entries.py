"""Log probabilities of a prompt as front ends show them: an entry for each token, in vLLM's form."""

from collections.abc import Sequence

from apt_jax.request import Logprob, PromptLogprobs
from apt_jax.text.tokenizer import Tokenizer


def prompt_entries(
    token_ids: Sequence[int], logprobs: PromptLogprobs, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    """Return an entry for each token of a prompt: the token itself, then the most likely ones in its place.

    Takes some microseconds for each number: call it outside of event loops where the prompt may be long.

    Args:
        token_ids: the prompt.
        logprobs: of all its tokens but the first, whose entry is None.
        tokenizer: gives the texts of tokens, as they go on with the text before them; None: they have none.
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
