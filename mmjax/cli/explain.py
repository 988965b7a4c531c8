"""`mmjax explain`: a prompt's tokens, and where its media stand, without running the model."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from mmjax.cli.messages import user_message


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print a prompt's tokens, or the same as JSON."""
    options = _parse(argv, prog)
    explanation = _explain(options)
    if options.json:
        print(json.dumps(explanation.to_dict(), indent=1))
    else:
        print(explanation.to_text())
    return 0


def _explain(options: argparse.Namespace) -> Any:
    # Imported here: transformers is slow.
    from mmjax.frontend.prompt.chat import ChatParser
    from mmjax.frontend.prompt.input_processor import InputProcessor
    from mmjax.models.model_source import load_model_config

    messages = [user_message(" ".join(options.text), options.image, clips=options.audio)]
    processor = InputProcessor(load_model_config(options.model, revision=options.revision))
    try:
        chat = ChatParser.for_model(processor)
        return processor.explain(processor.connector.fetch_now(chat.parse(messages)))
    finally:
        processor.close()


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add: Any = parser.add_argument
    add("text", nargs="+", help="a user's message")
    add("--image", action="append", default=[], help="a file or a URL; may be given repeatedly")
    add("--audio", action="append", default=[], help="a file or a URL; may be given repeatedly")
    add("--model", help="a directory or a hub id; default: the embedded one")
    add("--revision", help="of a hub id")
    add("--json", action="store_true", help="with the tensors of each image and clip")
    return parser.parse_args(argv)
