"""``python -m pcdeq``, which is also what ``torchrun -m pcdeq`` runs."""

import sys

from pcdeq.cli import main

sys.exit(main())
