"""Generate without a server: two prompts with an SLO, and the timings of their outputs."""

from apt_jax import LLM, SLO, SamplingParams


def main(model: str = "tiny-opt") -> None:
    llm = LLM(model, cache="hybrid", scheduling_policy="apt", max_num_seqs=4, warm_up=False)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    llm.generate(["Good morrow", "How now, my lord?"], params)  # compiles what two prompts need, which is not timed
    outputs = llm.generate(
        ["Once upon a time", "Shall I compare thee to a summer's day?"],
        params,
        slo=SLO(ttft_s=5.0, tbt_s=1.0),
    )
    for output in outputs:
        metrics, completion = output.metrics, output.outputs[0]
        print(f"{output.prompt}{completion.text}")
        print(
            f"  {completion.finish_reason}, first token after {metrics.ttft_s:.2f} s, SLO attained: {metrics.slo_attained}"
        )


if __name__ == "__main__":
    main()
