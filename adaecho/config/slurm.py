"""Keys of ``hydra/launcher=slurm``. Hydra imports this file for every app, so it imports little."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SlurmSettings:
    """Settings of Slurm jobs. The defaults work on any cluster: one CPU, no GPU, no partition."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    timeout_min: int = 60  # time limit of a job; the next job continues a trial that was cut short
    nodes: int = 1  # nodes * tasks_per_node ranks train each trial together
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    mem_gb: float = 2.0  # per node
    gpus_per_node: int | None = None
    trials_per_job: int = 1  # trials per submitted job; raise it for short trials
    array_parallelism: int = 256  # maximum number of jobs
    max_num_timeout: int = 20  # how often a job is requeued after a time-out
    signal_delay_s: int = 120  # seconds before the time limit to write a checkpoint
    setup: list[str] = field(default_factory=list)  # shell lines to run before the job, e.g. module load
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # other sbatch options
    wait: bool = True  # false: submit and return

    @property
    def ranks(self) -> int:
        """Number of tasks per job, which train each trial together."""
        return self.nodes * self.tasks_per_node
