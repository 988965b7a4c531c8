"""Let the tests import tiny_scenes' scripts as they import each other: by bare name."""

import sys
from pathlib import Path

TINY_SCENES = Path(__file__).parents[2] / "checkpoints" / "tiny_scenes"
sys.path.insert(0, str(TINY_SCENES))
