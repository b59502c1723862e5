from apt_jax.engine.timeline import DecisionLog as DecisionLog
from apt_jax.engine.timeline import RequestDecisions as RequestDecisions
