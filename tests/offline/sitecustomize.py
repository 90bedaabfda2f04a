"""Found by the Python processes that tests start: they stay on this machine, too."""

import no_network  # noqa: F401
