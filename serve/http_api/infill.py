"""Fill-in-the-middle prompts, for `suffix` of completions and llama.cpp's ``/infill``."""

import dataclasses
from collections.abc import Sequence

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.request import EngineRequest
from apt_jax.text.fill_in_middle import ExtraFile, FillInMiddle, fill_in_middle
from apt_jax.validation import check_text, check_text_length

SUFFIX = "suffix"


def prompt_around(
    parts: EngineComponents, prefix: object, suffix: object, *, names: tuple[str, str] = ("prompt", SUFFIX),
    begun: object = "", files: Sequence[ExtraFile] = (),
) -> list[int]:  # fmt: skip
    """Return the token ids of a fill-in-the-middle prompt; see `FillInMiddle.prompt`.

    Args:
        parts: the engine's components.
        prefix, suffix: values from the request, not yet validated.
        names: field names of prefix and suffix, for errors.
        begun: start of the text to fill in, which the output continues; the field `prompt` of ``/infill``.
        files: other files as context; the field `input_extra` of ``/infill``.

    Raises:
        InvalidRequestError: the model has no fill-in-the-middle tokens, or a value is not text or is too long.
    """
    maker = fill_in_middle(parts.tokenizer, names[1])
    texts = [
        _checked(parts, field, text) for field, text in zip((*names, "prompt"), (prefix, suffix, begun), strict=True)
    ]
    extra = [ExtraFile(*(_checked(parts, "input_extra", text) for text in file)) for file in files]
    return maker.prompt(texts[0], texts[1], begun=texts[2], files=extra)


def ending_with_middle(parts: EngineComponents, request: EngineRequest) -> EngineRequest:
    """Return the request with the tokens that end filled-in text added to its stop tokens, unless it ignores EOS."""
    params = request.params
    if params.ignore_eos:
        return request
    maker: FillInMiddle = fill_in_middle(parts.tokenizer, SUFFIX)
    ends = tuple(dict.fromkeys([*params.stop_token_ids, *maker.stop_token_ids]))
    return dataclasses.replace(request, params=dataclasses.replace(params, stop_token_ids=ends))


def _checked(parts: EngineComponents, field: str, value: object) -> str:
    if value == "" and isinstance(value, str):
        return ""
    text = check_text(field, value)
    if parts.tokenizer is None:
        raise InvalidRequestError(field, "this model has no tokenizer")
    check_text_length(parts.limits, parts.tokenizer, text, field)
    return text
