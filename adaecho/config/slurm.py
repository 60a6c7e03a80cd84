"""Keys of ``hydra/launcher=slurm``. Hydra reads them for every app on the machine: nothing heavy here."""

from dataclasses import dataclass, field
from typing import Any

from adaecho.config.bounds import within
from adaecho.errors import ConfigError

_RANGES = {
    "[1, inf)": ("timeout_min", "nodes", "tasks_per_node", "cpus_per_task", "trials_per_job",
                 "array_parallelism"),
    "[0, inf)": ("max_num_timeout", "signal_delay_s"),
    "(0, inf)": ("mem_gb",),
}  # fmt: skip


@dataclass
class SlurmSettings:
    """How to ask for jobs. The defaults are what any cluster takes: one CPU, no GPU or partition."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    timeout_min: int = 60  # of a job; a trial that is cut short goes on in the next
    nodes: int = 1  # nodes x tasks_per_node ranks train each trial of a job together
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    mem_gb: float = 2.0  # per node
    gpus_per_node: int | None = None
    trials_per_job: int = 1  # one job is submitted for so many: packs short trials
    array_parallelism: int = 256  # jobs at most
    max_num_timeout: int = 20  # how often a job may be requeued after its time was up
    signal_delay_s: int = 120  # time to end a step and write a checkpoint before the limit
    setup: list[str] = field(default_factory=list)  # shell lines before the job, e.g. module load
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # other sbatch options
    wait: bool = True  # false submits and returns

    def __post_init__(self) -> None:
        for interval, keys in _RANGES.items():
            for key in keys:
                within(f"hydra.launcher.{key}", getattr(self, key), interval)
        if self.gpus_per_node and self.tasks_per_node > self.gpus_per_node:
            raise ConfigError(
                f"hydra.launcher.tasks_per_node={self.tasks_per_node}: each rank takes a GPU of its own, "
                f"and gpus_per_node={self.gpus_per_node}; ask for as many of both"
            )

    @property
    def ranks(self) -> int:
        """How many tasks a job has, which train each of its trials together."""
        return self.nodes * self.tasks_per_node
