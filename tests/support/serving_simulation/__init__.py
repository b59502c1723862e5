"""Deterministic simulation of whole servers: HTTP application, calls, admission, `AsyncEngine`, engine; several replicas.

`simulate_serving(seed)` draws a scenario and runs it on a `VirtualLoop`: clients with API keys send completions to one
to three replicas through a small model of a router, read slowly, stop reading or leave in any state; steps fail, hang
or are slow; clocks jump; processes are stopped, paused, cut off, killed and started again. Real are the ASGI
application with everything behind it (`serve.http_api.app`, `serve.generate_call`, `apt_jax.validation`,
`apt_jax.frontend`, `apt_jax.engine`); not real are sockets, threads, time, the model and llguidance.

Every call has one outcome, which its client writes down: what it got is compared with `reference_tokens`, what it was
told with what the scenario allows, what was run for it with what it was told. First phase: arrivals and faults; second
phase: both stop, everything must end, and nothing may be left.

Any failure is a `SimulationError` that ends with the command that replays it:

    python -m tests.support.serving_simulation SEED

From what a seed determines to the whole history:

| module | contents |
|---|---|
| `scenario` | settings that a seed determines |
| `calls` | a client's call as drawn, and its answer |
| `world` | what every part shares: seed, loop, events, the first failure |
| `connection` | one HTTP call on its way, in place of sockets |
| `engine` | engine, watchdog and clock of a replica, in place of threads and time |
| `faults` | faults in a replica: steps that fail or hang, preemptions, jumps of the clock |
| `replica` | one server process, from its start to its end |
| `replica_checks` | checks in a replica, in each iteration and after its stop |
| `admission_recount` | admission decided again, by counting |
| `processes` | the replicas of all places: started, stopped, killed, paused, cut off |
| `router` | a small model of a gateway |
| `client` | a call sent and read, and sent again |
| `answer_check` | checks of what a client got, against the reference and what the scenario allows |
| `simulation` | the two phases of a history, and what may be left after it |
"""

from tests.support.serving_simulation.simulation import ServingReport, simulate_serving

__all__ = ["ServingReport", "simulate_serving"]
