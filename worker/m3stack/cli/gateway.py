"""`m3stack gateway`: hands the arguments to the compiled gateway and waits for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from m3stack import _gateway
from m3stack.checkpoint_tools.locate import HubOptions, is_hub_id, locate_model
from m3stack.errors import StartupError

MODEL_FLAG, NAME_FLAG = "--model-path", "--served-model-name"


def main(argv: Sequence[str]) -> int:
    """Runs the gateway until SIGINT or SIGTERM.

    Returns:
        The gateway's exit code; 0 after a drained stop, 1 if a model cannot be fetched.
    """
    try:
        arguments = with_local_model(argv)
    except StartupError as error:
        print(f"m3stack gateway: {error}", file=sys.stderr)
        return 1
    return _gateway.serve(arguments)


def with_local_model(argv: Sequence[str], options: HubOptions | None = None) -> list[str]:
    """The arguments with a hub id behind `--model-path` replaced by the directory it is fetched to.

    Weights are left on the hub: a gateway needs config, tokenizer and template. What is no hub id
    stays as it is, for the gateway to judge.

    Raises:
        StartupError: the repository cannot be fetched.
    """
    arguments = list(argv)
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag != MODEL_FLAG:
            continue
        at = index if equals else index + 1
        value = value if equals else "".join(arguments[at : at + 1])
        if not is_hub_id(value):
            return arguments
        model = locate_model(value, options or HubOptions(with_weights=False))
        arguments[at] = f"{flag}={model.directory}" if equals else str(model.directory)
        if not any(argument.split("=")[0] == NAME_FLAG for argument in arguments):
            arguments += [NAME_FLAG, model.name]
        return arguments
    return arguments
