"""OpenAI's Responses API. Responses can be stored in memory; conversations and prompts cannot."""
