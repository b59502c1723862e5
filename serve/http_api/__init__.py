"""HTTP server on uvicorn: APIs of OpenAI, Anthropic, Ollama and others, and the endpoints for operators."""
