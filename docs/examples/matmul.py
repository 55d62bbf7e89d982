"""200 steps of a matrix product whose factors lie on the parameter server: one script, all roles.

    python docs/examples/matmul.py --job_name ps --task_index 0
    python docs/examples/matmul.py --job_name worker --task_index 0    # the chief
    python docs/examples/matmul.py --job_name worker --task_index 1

Nothing is learned: each worker pulls `x` and `w` and multiplies them, until it sees the job's
global_step at 200 (a step that another has under way then still counts, as in TensorFlow). The
parameter server stays until you press Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import numpy.typing as npt

import paramserver as ps
from paramserver.layout import Variable
from paramserver.placement import place
from worker.data import Batch
from worker.hooks import LoggingHook, StopAtStepHook
from worker.session import TrainingSession

Array = npt.NDArray[np.float32]


class Product:
    """x @ w. Variables of a parameter server are floats, because gradients are: the whole numbers
    are held as float32, exactly."""

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """A row and a column."""
        return {"x": np.array([[1, 2, 3]], np.float32), "w": np.array([[4], [5], [6]], np.float32)}

    def loss_and_grads(
        self, params: Mapping[str, Array], batch: Batch
    ) -> tuple[float, dict[str, Array]]:
        """The product, and no gradients.

        What counts steps is the parameter server, and what it counts is pushes: a push of no
        gradients is a step all the same. The optimizer never touches x and w."""
        product = params["x"] @ params["w"]
        return float(product[0, 0]), {}


class NoData:
    """The product needs no input."""

    def batch(self, clock: int) -> Batch:
        """No rows."""
        return Batch(np.empty((0, 0), np.float32), np.empty(0, np.float32))


def serve(cluster: ps.ClusterSpec, task_index: int) -> None:
    """A parameter server: blocks until Ctrl-C."""
    address = cluster.ps[task_index]
    with ps.Server(address.port, address.host) as server, suppress(KeyboardInterrupt):
        print(f"ps serving on {server.address}", flush=True)
        server.join()


def work(cluster: ps.ClusterSpec, task_index: int) -> None:
    """A worker: blocks until the 200 steps are done."""
    is_chief = task_index == 0
    model = Product()
    with ps.Client(cluster.job_tasks("ps"), f"worker:{task_index}") as client:
        if is_chief:
            client.initialize(model.init(np.random.default_rng(0)))
        hooks = [StopAtStepHook(last_step=200), LoggingHook(every_n_steps=50)]
        summary = TrainingSession(client, model, NoData(), hooks).run()
    log_device_placement(cluster, task_index, summary.params)
    product = summary.params["x"] @ summary.params["w"]
    print(f"step {summary.global_step}: x @ w = {product[0, 0]:g} after {summary.steps} steps here")


def log_device_placement(
    cluster: ps.ClusterSpec, task_index: int, params: Mapping[str, Array]
) -> None:
    """Where everything is: placement is a pure function of names and sizes."""
    variables = [Variable(name, value.dtype.name, value.shape) for name, value in params.items()]
    for index, placed in enumerate(place(variables, len(cluster.ps))):
        for variable in placed:
            print(f"{variable.name}: (Variable): /job:ps/task:{index}")
    print(f"MatMul: (NumPy): /job:worker/task:{task_index}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--job_name", choices=["ps", "worker"], required=True)
    parser.add_argument("--task_index", type=int, default=0)
    parser.add_argument("--ps_hosts", default="localhost:1681")
    parser.add_argument("--worker_hosts", default="localhost:1682,localhost:1683")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cluster = ps.ClusterSpec(
        {"ps": args.ps_hosts.split(","), "worker": args.worker_hosts.split(",")}
    )
    {"ps": serve, "worker": work}[args.job_name](cluster, args.task_index)


if __name__ == "__main__":
    main()
