from apt_jax.engine.events import Iteration as Iteration
from apt_jax.engine.events import SchedulerWatch as SchedulerWatch
from apt_jax.engine.events import WatchNews as WatchNews
