"""The room protocol under a seeded clock and network that break everything on purpose.

`run_seed` plays one world; ``python -m pdjax.launch simulate`` plays many.
"""

from pdjax.disagg.simulate.run import Outcome, run_seed
from pdjax.disagg.simulate.settings import Settings

__all__ = ["Outcome", "Settings", "run_seed"]
