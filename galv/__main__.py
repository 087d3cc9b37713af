"""`python -m galv`, for launchers that start a module: `torchrun --nproc-per-node 8 -m galv run plan.json`."""

from __future__ import annotations

from galv.cli.main import main

if __name__ == "__main__":
    main()
