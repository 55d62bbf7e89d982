"""The same push and pull by TensorFlow and torch, where they are installed.

Each in processes of its own, over TCP on loopback; nothing of ours takes part.
A push subtracts a gradient from a variable on the server; a pull brings the variable to memory of
the worker. What was pushed is checked at the end, for an optimizer that drops the transfer is fast.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from benchmarks import child
from benchmarks.benchmark import Benchmark
from benchmarks.figures import Round, transfer
from benchmarks.processes import Processes, Task, free_port
from benchmarks.scale import label

LEARNING_RATE = 0.5

PEERS = {"tensorflow": ("TensorFlow", "tensorflow-cpu"), "torch": ("torch rpc", "torch")}


class TensorFlow:
    """A task of a cluster in the way of TensorFlow 1: a graph over the devices of "ps" and
    "worker"."""

    def __init__(self, job: str, ports: list[int], nbytes: int) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        import tensorflow

        tf = tensorflow.compat.v1
        tf.disable_v2_behavior()
        cluster = {
            name: [f"127.0.0.1:{port}"] for name, port in zip(("ps", "worker"), ports, strict=True)
        }
        self._server = tf.train.Server(cluster, job_name=job, task_index=0)
        if job == "ps":
            return
        shape, local = [nbytes // 4], tf.GraphKeys.LOCAL_VARIABLES
        with tf.device("/job:ps/task:0"):
            value = tf.get_variable("value", shape, initializer=tf.zeros_initializer())
        with tf.device("/job:worker/task:0"):
            start = tf.constant_initializer(LEARNING_RATE)
            grad = tf.get_variable("grad", shape, initializer=start, collections=[local])
            pull = tf.identity(value)
        with tf.device("/job:ps/task:0"):
            push = tf.assign_sub(value, grad)
            extremes = [tf.reduce_min(value), tf.reduce_max(value)]
        self._session = tf.Session(self._server.target)
        self._session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        # The operations themselves, so that nothing is fetched into Python.
        self._calls = {
            "push": self._session.make_callable(push.op),
            "pull": self._session.make_callable(pull.op),
        }
        self._extremes = extremes
        self._pushed = 0

    def measure(self, what: str, repeats: int) -> list[float]:
        """Seconds of each."""
        seconds = child.timed(self._calls[what], repeats)
        if what == "push":
            self._pushed += repeats + 2
        _check(self._session.run(self._extremes), self._pushed)
        return seconds


class Torch:
    """A node of torch.distributed.rpc, over TCP: without its shared memory."""

    def __init__(self, job: str, ports: list[int], nbytes: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
        import torch
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{ports[0]}", _transports=["uv"], _channels=["basic"]
        )
        rank = ("ps", "worker").index(job)
        rpc.init_rpc(job, rank=rank, world_size=2, rpc_backend_options=options)
        if job == "ps":
            return
        grad = torch.full((nbytes // 4,), LEARNING_RATE)

        def call(function: Callable[..., Any], *args: Any) -> Any:
            return rpc.rpc_sync("ps", function, args=args)

        call(_torch_create, nbytes // 4)
        self._calls = {
            "push": lambda: call(_torch_push, grad),
            "pull": lambda: call(_torch_pull),
        }
        self._pushed = 0

    def measure(self, what: str, repeats: int) -> list[float]:
        """Seconds of each."""
        seconds = child.timed(self._calls[what], repeats)
        if what == "push":
            self._pushed += repeats + 2
        value = self._calls["pull"]()
        _check([float(value.min()), float(value.max())], self._pushed)
        return seconds


#: What the server of torch holds; its functions are called by name, from the worker.
_torch_value: list[Any] = []


def _torch_create(elements: int) -> None:
    import torch

    _torch_value[:] = [torch.zeros(elements)]


def _torch_push(grad: Any) -> None:
    _torch_value[0].sub_(grad)


def _torch_pull() -> Any:
    return _torch_value[0]


def _check(extremes: Any, pushed: int) -> None:
    low, high = (float(each) for each in extremes)
    assert low == high == -LEARNING_RATE * pushed, (low, high, pushed)


def peers(bench: Benchmark, say: Callable[[str], object]) -> None:
    """Push and pull at the size of the floors."""
    large = bench.scale.large
    for module, (name, package) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            say(f"{name}: not installed; pip install {package} has it measured as well")
            continue
        rounds: dict[str, list[Round]] = {"push": [], "pull": []}
        for _ in range(bench.scale.rounds):
            with Processes() as run:
                worker = _start(run, module, large)
                for what, own in rounds.items():
                    yardstick = bench.yard.raw(large)
                    repeats = bench.scale.repeats(large)
                    own.append(Round(yardstick, worker.call("measure", what=what, repeats=repeats)))
        for what, own in rounds.items():
            figure = f"{name} {what} {label(large)}"
            bench.record(transfer("peers", figure, own, large, large))


def _start(run: Processes, module: str, nbytes: int) -> Task:
    """Both tasks of a peer; the worker's, once it is ready."""
    ports = [free_port(), free_port()]
    jobs = [
        run.task("peers", module, job=job, ports=ports, nbytes=nbytes) for job in ("ps", "worker")
    ]
    for task in jobs:
        task.ready()
    return jobs[1]


if __name__ == "__main__":
    child.serve({"tensorflow": TensorFlow, "torch": Torch})
