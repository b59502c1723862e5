"""Interfaces to the engine: offline (`llm`) and asynchronous (`async_engine`), and building an engine (`builder`)."""
