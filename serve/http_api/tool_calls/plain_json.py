"""Calls of models whose template has no form of its own: the output is JSON, an object with ``name`` and ``arguments``
or an array of such objects."""

from serve.http_api.tool_calls.llama3_json import LeadingCalls


class JsonCalls(LeadingCalls):
    """Calls of functions that the request has; any other JSON is content."""

    brackets = "{["
