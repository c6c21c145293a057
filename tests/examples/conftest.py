"""The example's files import one another by plain names, as they do when one of them is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "state_tracking"))
