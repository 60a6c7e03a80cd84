"""One run from config to summary: training loop, schedules, evaluation and checkpoints."""
