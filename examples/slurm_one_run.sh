#!/bin/bash
# Train on several nodes: sbatch examples/slurm_one_run.sh. Training resumes after a timeout or preemption.
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=16
#SBATCH --time=60 --signal=USR2@120 --requeue --open-mode=append

run=$PWD/runs/my-run
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 4 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 12000))" \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR2 --shutdown-timeout 100 \
    -m adaecho.run task=digits hydra.run.dir="$run"
grep -q '"signal": "SIGUSR2"' "$run/summary.json" && scontrol requeue "$SLURM_JOB_ID"
