"""``python -m attnres_serve``."""

import sys

from attnres_serve.cli import main

sys.exit(main())
