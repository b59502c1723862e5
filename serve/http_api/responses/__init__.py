"""OpenAI's Responses API without its stored objects, such as earlier responses and conversations."""
