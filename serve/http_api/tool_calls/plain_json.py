"""Parser of tool calls from models whose chat template defines no format for them: the output is a JSON object with
``name`` and ``arguments``, or an array of such objects."""

from serve.http_api.tool_calls.llama3_json import LeadingCalls


class JsonCalls(LeadingCalls):
    """Parses calls of functions in the request; any other JSON is content."""

    brackets = "{["
