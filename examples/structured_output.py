"""Constrain outputs: JSON that a schema allows, and one of several texts (`pip install 'apt-jax[structured]'`)."""

import json

from apt_jax import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(model: str = "tiny-opt") -> None:
    llm = LLM(model, max_num_seqs=2, warm_up=False)
    constraints = {
        "The king is": StructuredOutputsParams(json=SCHEMA),
        "To be or not to be?": StructuredOutputsParams(choice=["yes", "no"]),
    }
    for prompt, constraint in constraints.items():
        params = SamplingParams(max_tokens=100, seed=1, structured_outputs=constraint)
        text = llm.generate(prompt, params)[0].outputs[0].text
        print(prompt, json.loads(text) if constraint.json is not None else text)


if __name__ == "__main__":
    main()
