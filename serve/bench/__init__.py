"""The load tool behind `apt-jax bench`.

1. `load.py` samples requests and arrivals from traces, fixed lengths or prompts in a file.
2. `registry.py` opens a backend: `grpc_backends.py` (two services) or `http_backends.py` (completions, chat).
3. `runner.py` sends the requests, records when each token arrives, and checks whether the client keeps up.
4. `report.py` makes the summary, table, CSV, JSON and plot; `search.py` searches for the highest rate that meets a target.
"""
