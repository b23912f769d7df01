"""``python -m destrier.cli``."""

import sys

from destrier.cli import main

sys.exit(main())
