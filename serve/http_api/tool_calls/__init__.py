"""Tool calls and reasoning in the text of a model: constraints on the output, and its parsing.

1. `definitions.read_tools` checks the tools of a request, for all APIs.
2. `plan.plan_output` creates the constraint on the output and the parser of its text.
3. The text of each choice of a response is pushed through its own `events.OutputParser`, whose events are pieces of
   content, reasoning and calls. Streamed and other responses use the same parser, so they always agree.
"""
