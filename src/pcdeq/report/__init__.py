"""Reports: figures of runs."""

from pcdeq.extras import needing

with needing("train", "a report"):
    import matplotlib as matplotlib
