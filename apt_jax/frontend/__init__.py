"""Interfaces to the engine, offline (`llm`) and asynchronous (`async_engine`), and the code that builds engines
(`builder`)."""
