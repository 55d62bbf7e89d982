"""A parameter server from scratch: gRPC, Protobuf, pure Python and NumPy.

    import numpy as np, paramserver as ps

    with ps.Server(port=0) as server, ps.Client(server.address, worker="worker:0") as client:
        client.initialize({"w": np.zeros(4, np.float32)}, optimizer=ps.optimizers.SGD(0.5))
        params = client.pull()
        client.push({"w": np.ones(4, np.float32)})

`Server` is a shard in this process, `Client` what a worker holds. The modules stand in layers, and
import only downwards: `shard` and what it uses decide and do no I/O; `framing`, `codec`,
`transport` put arrays on the wire; `client` and `server` connect the two.
"""

from paramserver import optimizers
from paramserver.client import Client
from paramserver.cluster import ClusterSpec
from paramserver.consistency import Async, Ssp, Sync
from paramserver.errors import ParamServerError
from paramserver.params import Params
from paramserver.push import PushResult
from paramserver.server import Server

__all__ = [
    "Async",
    "Client",
    "ClusterSpec",
    "ParamServerError",
    "Params",
    "PushResult",
    "Server",
    "Ssp",
    "Sync",
    "optimizers",
]
