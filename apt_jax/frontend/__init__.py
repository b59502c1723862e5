"""Interfaces to the engine: offline (`llm`) and asynchronous (`async_engine`), and the builder of engines
(`builder`)."""
