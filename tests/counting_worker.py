"""A worker for tests: pushes ones until the job is complete, and says what was acknowledged.

    python counting_worker.py ADDRESSES WORKER

Writes "joined", then "ack VERSION GLOBAL_STEP" for each push that counts, "aborted WHY" when it has
to begin anew, and "complete GLOBAL_STEP" at the end.
"""

from __future__ import annotations

import sys

import numpy as np

import paramserver as ps
from paramserver.errors import AbortedError


def say(line: str) -> None:
    """All of a line at once: this process may be killed at any moment."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(addresses: str, worker: str) -> None:
    with ps.Client(addresses, worker=worker, connect_timeout=30) as client:
        turns = int(worker.rpartition(":")[2]) % 2 == 0
        while True:
            try:
                params = client.pull()
                say("joined")
                while not params.complete:
                    grads = {name: np.ones_like(params[name]) for name in params}
                    if turns:
                        params = client.push_pull(grads)
                        result = client.last_result
                    else:
                        result = client.push(grads)
                    if result and result.applied:
                        say(f"ack {result.version} {result.global_step}")
                    if not turns:
                        params = client.pull()
                break
            except AbortedError as error:
                say(f"aborted {error}")
        say(f"complete {params.version}")


if __name__ == "__main__":
    main(*sys.argv[1:])
