"""The scheduling laboratory: the engine, the scheduler and the cache that serve, on a cost model instead of a
device."""
