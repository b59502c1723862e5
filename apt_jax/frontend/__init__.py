"""Offline (`llm`) and asynchronous (`async_engine`) interfaces to the engine, and the code that builds engines
(`builder`)."""
