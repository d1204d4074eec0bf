"""``python -m pcdeq.testing``."""

import sys

from pcdeq.testing.self_check import main

sys.exit(main())
