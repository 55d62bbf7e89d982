"""The chief worker of the linear regression: job_name "worker", task_index 0. See job.py."""

from job import cluster_from, train

if __name__ == "__main__":
    train(cluster_from(), task_index=0)
