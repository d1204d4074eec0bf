"""``python -m pcdeq``, which is also what ``torchrun -m pcdeq`` runs."""

from pcdeq.cli import leave, main

if __name__ == "__main__":
    leave(main())
