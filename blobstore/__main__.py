"""`python -m blobstore` is `blobstore`."""

from __future__ import annotations

import sys

from blobstore.cli import main

sys.exit(main())
