"""Many trainings at once: comparisons and searches."""
