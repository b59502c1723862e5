"""OpenAI's HTTP API and the endpoints for operators, over uvicorn."""
