"""Why something was not stored or not found: the words of logs and metrics.

Those of the store's client and daemon are theirs: what is compared here must be what
they say.
"""

from blobstore.clients import writing
from blobstore.errors import Busy, DeadlineExceeded, Unavailable

ABSENT = "absent"
"""The store does not have it."""
UNAVAILABLE = Unavailable.code
"""There is no daemon, or it is left alone for a moment."""
DEADLINE = DeadlineExceeded.code
"""It did not answer in time."""
FAILED = "failed"
"""A fault, which the log tells of."""
UNNAMED = "unnamed"
"""The identity of model or adapter cannot be told, or not yet."""
LATE = "late"
"""Memory came too late for what a step had computed."""
BUSY = Busy.code
"""Too much waits already."""
ORPHAN = writing.ORPHAN
"""What it continues has left the store."""
REFUSED = "refused"
"""The store did not take it, and a writer's results do not say why."""
STOPPED = "stopped"
"""The engine was ending, or waited for its transfers to end."""
