"""What a run's results depend on is under checksums, and clients have names: nothing is lost or exchanged unsaid."""
