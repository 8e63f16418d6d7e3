from __future__ import annotations

import sys
from pathlib import Path

# Child processes import their functions by module name.
sys.path.insert(0, str(Path(__file__).parent))
