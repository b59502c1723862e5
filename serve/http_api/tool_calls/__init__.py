"""Tool calls and reasoning in a model's output: how the output is constrained and parsed.

1. `definitions.read_tools` checks the tools of a request, for all APIs.
2. `plan.plan_output` creates the constraint on the output and the parser of its text.
3. The text of each choice of a response is pushed through its own `events.OutputParser`, whose events are pieces of
   content, reasoning and calls. Responses use the same parser whether they are streamed or not, so they always agree.
"""
