"""What the three processes of the linear regression share: the cluster, the model, the loop.

    python docs/examples/linreg/ps.py          # on port 1681
    python docs/examples/linreg/worker0.py     # the chief worker
    python docs/examples/linreg/worker1.py

Start them in any order. Both workers learn y = 2 x from halves of the data; each step averages
their gradients. The parameter server ends when the job is done.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

import paramserver as ps
from paramserver.control_client import ControlClient
from worker.data import Batch, Batches, load_data
from worker.hooks import LoggingHook, StepCounterHook
from worker.session import Summary, TrainingSession

Array = npt.NDArray[np.float32]


def cluster_from(argv: Sequence[str] | None = None) -> ps.ClusterSpec:
    """Who is where. A worker's address is its name in the cluster: nothing listens there, because
    workers only call."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ps_hosts", default="localhost:1681")
    parser.add_argument("--worker_hosts", default="localhost:1682,localhost:1683")
    args = parser.parse_args(argv)
    return ps.ClusterSpec(
        {"ps": args.ps_hosts.split(","), "worker": args.worker_hosts.split(",")},
    )


class LinearRegression:
    """prediction = W x + b, and the mean squared error."""

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Both variables at zero."""
        return {"W": np.zeros((), np.float32), "b": np.zeros((), np.float32)}

    def loss_and_grads(
        self, params: Mapping[str, Array], batch: Batch
    ) -> tuple[float, dict[str, Array]]:
        """The loss, and what it changes by with W and with b."""
        x, y = batch.x[:, 0], batch.y
        error = params["W"] * x + params["b"] - y
        return float(np.mean(error**2)), {
            "W": np.asarray(np.mean(2 * error * x)),
            "b": np.asarray(np.mean(2 * error)),
        }


def train(cluster: ps.ClusterSpec, task_index: int) -> Summary:
    """One worker's life; worker 0 is the chief, which says what is to be learned, and how."""
    job_name = "worker"
    is_chief = task_index == 0
    workers = cluster.num_workers
    model = LinearRegression()
    batches = Batches(load_data("line"), 25, seed=0, index=task_index, workers=workers)
    hooks = [LoggingHook(every_n_steps=50), StepCounterHook(every_n_steps=50)]
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    with ps.Client(cluster.job_tasks("ps"), f"{job_name}:{task_index}") as client:
        if is_chief:
            client.initialize(
                model.init(np.random.default_rng(0)),
                optimizer=ps.optimizers.SGD(0.1),
                consistency=ps.Sync(workers),
                last_step=200,
            )
        summary = TrainingSession(client, model, batches, hooks).run()

    if is_chief:
        # TensorFlow's servers never ended. Ours does, once every worker knows that all is done.
        with ControlClient(cluster.job_tasks("ps"), "the chief worker") as control:
            control.survey()
            control.shutdown(now=False, reason="trained")
    w, b = float(summary.params["W"]), float(summary.params["b"])
    print(f"step {summary.global_step}: W={w:.4f} b={b:.4f} loss={summary.last_loss:.4f}")
    return summary
