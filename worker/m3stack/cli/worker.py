"""`m3stack worker`: settings from flags, environment and file, then serve until a signal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from m3stack.assemble import build_follower
from m3stack.checkpoint_tools.locate import locate_model
from m3stack.errors import StartupError
from m3stack.flags import load_config
from m3stack.follow_host import run_follower
from m3stack.serve import run_worker

# as the gateway has it: settings that cannot be used, which starting again does not mend
EXIT_CONFIG = 2


def main(argv: Sequence[str]) -> int:
    """Runs one worker.

    Returns:
        0 after a drained stop, 1 if it could not start or failed, 2 for settings that cannot be
        used; of a host that follows, as `run_follower`.
    """
    try:
        config = load_config(argv)
    except StartupError as error:
        print(f"m3stack worker: {error}", file=sys.stderr)
        return EXIT_CONFIG
    try:
        model = locate_model(config.model_path)
        name = config.served_model_name or model.name
        config = replace(config, model_path=str(model.directory), served_model_name=name)
        if config.host_index:
            return run_follower(config, build_follower)
        return run_worker(config)
    except StartupError as error:
        print(f"m3stack worker: {error}", file=sys.stderr)
        return 1
