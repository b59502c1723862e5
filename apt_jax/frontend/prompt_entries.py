"""Log probabilities of a prompt as front ends show them: an entry for each token, in vLLM's form."""

from collections.abc import Callable, Sequence

from apt_jax.request import Logprob, PromptLogprobs

TokenText = Callable[[int], str | None]


def prompt_entries(
    token_ids: Sequence[int], logprobs: PromptLogprobs, token_text: TokenText
) -> list[dict[int, Logprob] | None]:
    """Return an entry for each token of a prompt: the token itself, then the most likely ones in its place.

    Takes some microseconds for each number: call it outside of event loops where the prompt may be long.

    Args:
        token_ids: the prompt.
        logprobs: of all its tokens but the first, whose entry is None.
        token_text: text of a token; None: it has none.
    """
    entries: list[dict[int, Logprob] | None] = [None]
    own = zip(token_ids[1:], logprobs.logprob.tolist(), logprobs.rank.tolist(), strict=True)
    tops = zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
    for (token_id, logprob, rank), (ids, values) in zip(own, tops, strict=True):
        entry = {token_id: Logprob(logprob=logprob, rank=rank, decoded_token=token_text(token_id))}
        for place, (top_id, value) in enumerate(zip(ids, values, strict=True), 1):
            if top_id != token_id:
                entry[top_id] = Logprob(logprob=value, rank=place, decoded_token=token_text(top_id))
        entries.append(entry)
    return entries
