"""Many training runs with one command: what is to do, where, and how far it is.

    plan     the runs that a table needs, and which of them are done
    worker   one run, from wherever it stands to its end
    local    one run after the other, in this process
    on_ray   many at once, as tasks of a Ray cluster
    board    one live table of all runs

What counts is in the run folders, so that it does not matter who was killed when: what is complete in a folder is
done, and the rest is done again.
"""

from pcdeq.extras import needing

with needing("train", "training many runs"):
    from pcdeq.reproduce.board import Board
    from pcdeq.reproduce.local import run_locally
    from pcdeq.reproduce.on_ray import run_on_ray
    from pcdeq.reproduce.plan import Job, plan

__all__ = ["Board", "Job", "plan", "run_locally", "run_on_ray"]
