"""Tool calls and reasoning in the text of a model: what is asked of it, and how its text is read.

1. `definitions.read_tools` checks what a client says about tools, whichever API it speaks.
2. `plan.plan_output` makes of it the constraint on the output, and the parser of its text.
3. Each choice of a response pushes its text through an `events.OutputParser` of its own, whose events say what is
   content, reasoning or a call. Streamed or not, the events are the same, because the parser is.
"""
