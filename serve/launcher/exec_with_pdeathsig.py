"""Replace this process with COMMAND. The kernel kills COMMAND when process PARENT exits for any reason.

    python exec_with_pdeathsig.py PARENT CPUS COMMAND...

CPUS are comma-separated numbers of CPUs to bind COMMAND to, or empty. Run this file directly, not as a module. On
systems other than Linux, COMMAND keeps running if PARENT is killed.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _main(parent: int, cpus: str, command: list[str]) -> None:
    if sys.platform == "linux":
        if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit("prctl: the kernel has no PR_SET_PDEATHSIG")
        if os.getppid() != parent:  # the parent exited before the call
            sys.exit(1)
        if cpus:
            os.sched_setaffinity(0, map(int, cpus.split(",")))
    os.execv(command[0], command)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
