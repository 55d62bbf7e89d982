"""The parameter server of the linear regression: job_name "ps", task_index 0. See job.py."""

import sys

from job import cluster_from

from paramserver.__main__ import main

if __name__ == "__main__":
    port = cluster_from().ps[0].port
    sys.exit(main(["--port", str(port), "--exit-when-done"]))
