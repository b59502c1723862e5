"""Parser of calls of models whose chat template defines no form of calls: the output is a JSON object with ``name`` and
``arguments``, or an array of such objects."""

from serve.http_api.tool_calls.llama3_json import LeadingCalls


class JsonCalls(LeadingCalls):
    """Parses calls of the functions of the request; any other JSON is content."""

    brackets = "{["
