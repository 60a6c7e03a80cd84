"""The settings of ``hydra/launcher=slurm``."""

# Import only the standard library, because Hydra imports this file in every application.
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SlurmSettings:
    """Settings of Slurm jobs. The defaults request one CPU, no GPU and no partition."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    timeout_min: int = 60  # time limit of a job in minutes; the next job continues an unfinished trial
    nodes: int = 1  # number of nodes per job; nodes * tasks_per_node ranks train each trial together
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    mem_gb: float = 2.0  # memory per node in GB
    gpus_per_node: int | None = None
    # number of trials per job; raise it if trials are short
    trials_per_job: int = 1
    array_parallelism: int = 256  # maximum number of jobs
    max_num_timeout: int = 20  # maximum number of times that a job is requeued after a timeout
    signal_delay_s: int = 120  # a job writes a checkpoint this many seconds before its time limit
    # shell commands to run at the start of each job, for example module load
    setup: list[str] = field(default_factory=list)
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # further options for sbatch
    wait: bool = True  # whether to wait for the jobs; false: submit them and return immediately

    @property
    def ranks(self) -> int:
        """The number of tasks per job, which train each trial together."""
        return self.nodes * self.tasks_per_node
