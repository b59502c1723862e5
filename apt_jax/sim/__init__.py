"""The simulator: runs the serving engine, scheduler and cache on a cost model instead of a device."""
