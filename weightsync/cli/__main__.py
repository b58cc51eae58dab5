"""`python -m weightsync.cli`, for where the script is not on the path."""

import sys

from weightsync.cli import main

sys.exit(main())
