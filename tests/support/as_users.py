"""Whether every process starts as a user starts it, without the process farm.

``make test-as-users`` sets the variable; docs/build/process-farm.md says what that changes.
"""

import os

AS_USERS = os.environ.get("TEST_AS_USERS") == "1"
