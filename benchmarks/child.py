"""The far end of a pipe: a process that does as it is told, one JSON line at a time.

    $ python -m benchmarks.load Worker '{"ps": "127.0.0.1:1681", "index": 0}'
    {"ready": true}
    {"call": "push", "repeats": 5}                        <- stdin
    {"result": [0.051, 0.050, 0.052, 0.050, 0.051]}

It ends when its standard input does. `processes.Task` is the near end.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def serve(kinds: Mapping[str, Callable[..., Any]]) -> None:
    """Makes `kinds[argv[1]](**argv[2])` and answers calls of its methods until stdin ends.

    An exception is answered by its text, and its traceback goes to stderr as the process ends."""
    try:
        target = kinds[sys.argv[1]](**json.loads(sys.argv[2]))
        _say(ready=True)
        for line in sys.stdin:
            arguments = json.loads(line)
            _say(result=getattr(target, arguments.pop("call"))(**arguments))
    except Exception as error:
        _say(error=f"{type(error).__name__}: {error}")
        raise
    close = getattr(target, "close", None)
    if close:
        close()


def timed(
    work: Callable[[], object],
    repeats: int,
    before: Callable[[], object] | None = None,
    warm: int = 2,
) -> list[float]:
    """Seconds of each of `repeats` calls of `work`, after `warm` more; `before` is not counted."""
    seconds = []
    for _ in range(warm + repeats):
        if before:
            before()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds[warm:]


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)
