"""Reports: figures of runs."""
