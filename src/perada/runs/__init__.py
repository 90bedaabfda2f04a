"""Run folders: names, checkpoints, resuming, and what a finished run can do."""
