"""Embed texts and rank them by a question: `python examples/embeddings.py [MODEL]`.

A server does the same: `client.embeddings.create(model=..., input=[...])`, or `/v1/score` for the cosines, both with
`pooling: "mean"`.
"""

import sys

import numpy as np

from apt_jax import LLM


def main(model: str = "tiny-opt") -> None:
    llm = LLM(model, max_num_seqs=4, warm_up=False)
    question = "Who was king of England?"
    texts = ["Henry the Fifth was king of England.", "The sea is deep and cold.", "Good morrow, gentle lord."]
    wanted, *found = llm.embed([question, *texts], pooling="mean")
    scores = [float(np.dot(wanted, one)) for one in found]  # the embeddings have length 1
    print(question)
    for score, text in sorted(zip(scores, texts, strict=True), reverse=True):
        print(f"{score:7.4f}  {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
