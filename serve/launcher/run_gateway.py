"""Run the gateway smg with the given flags and a random admin key: python -m serve.launcher.run_gateway FLAGS.

Without an admin key, every client could change the gateway's list of servers. The key is created here and never leaves
this process, since every user of the machine can read the arguments of a process.
"""

import secrets
import sys

from smg.cli import main

if __name__ == "__main__":
    main(["launch", *sys.argv[1:], f"--control-plane-api-keys=launch:launch:admin:{secrets.token_hex(16)}"])
