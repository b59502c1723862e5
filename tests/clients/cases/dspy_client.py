"""DSPy."""

import dspy
from harness import BASE_URL, KEY, MODEL, QUESTION, expect, feature, run


def lm(**more: object) -> dspy.LM:
    return dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, max_tokens=200, cache=False, **more)


@feature("chat")
def chat() -> None:
    expect(lm()(QUESTION)[0])


@feature("completions")
def completions() -> None:
    made = dspy.LM(
        f"text-completion-openai/{MODEL}", model_type="text", api_base=BASE_URL, api_key=KEY, max_tokens=8, cache=False
    )
    expect(made("One two")[0])


@feature("Responses")
def responses() -> None:
    expect(lm(model_type="responses")(QUESTION)[0])


run()
