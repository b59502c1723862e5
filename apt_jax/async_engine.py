"""Re-exports of `apt_jax.frontend` under their former module name; kept for one release."""

from apt_jax.frontend.async_engine import AsyncEngine, Observer
from apt_jax.frontend.streams import EngineClosedError, RequestStream, RequestStreamGroup

__all__ = ["AsyncEngine", "EngineClosedError", "Observer", "RequestStream", "RequestStreamGroup"]
