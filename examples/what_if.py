"""Simulate SLO attainment by request rate and policy, on hardware that is not at hand.

The same as `apt-jax simulate --rates 2,4,8 --scheduling-policy fcfs,apt,apt-plus`, from Python.
"""

import dataclasses

from apt_jax.config import SLO
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate

RATES = (2.0, 4.0, 8.0)
POLICIES = ("fcfs", "apt", "apt-plus")


def main(num_requests: int = 200) -> None:
    base = SimulationConfig(
        model="opt-13b",
        hardware="a100-40gb",
        trace="sharegpt",
        num_requests=num_requests,
        slo=SLO(ttft_s=1.0, tbt_s=1.0),
    )
    print("requests/s  " + "".join(f"{policy:>10}" for policy in POLICIES))
    for rate in RATES:
        results = [simulate(dataclasses.replace(base, rate=rate, policy=policy)) for policy in POLICIES]
        print(f"{rate:10}  " + "".join(f"{result.slo_attainment:10.1%}" for result in results))


if __name__ == "__main__":
    main()
