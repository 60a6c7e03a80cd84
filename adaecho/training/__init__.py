"""Loop, schedules, evaluation, checkpoints: one run from config to summary."""
