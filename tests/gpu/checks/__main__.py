"""Run the checks: ``python tests/gpu/checks``, see ``run``."""

from __future__ import annotations

import sys
from pathlib import Path

# The folder of tests in the place of this one, as pytest has it. Ranks get the same path.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.checks.run import main

if __name__ == "__main__":
    sys.exit(main())
