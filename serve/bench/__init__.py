"""The load tool behind `apt-jax bench`.

1. `load.py` draws requests and arrivals, from traces, fixed lengths or prompts in a file.
2. `backends.py` opens a server: `grpc_backends.py` (two services) or `http_backends.py` (completions, chat).
3. `runner.py` sends, notes when every token comes, and watches whether the client itself keeps up.
4. `report.py` makes summary, table, CSV, JSON and picture of it; `search.py` looks for the highest rate that holds a target.
"""
