"""``python -m pdjax.server``: the frontend process of an instance. Its leader starts it."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import uvloop

from pdjax.server.app import make_app
from pdjax.server.chat_template import ChatTemplate
from pdjax.server.leader import Leader
from pdjax.server.metrics import Metrics
from pdjax.server.service import Service
from pdjax.server.vocabulary import Vocabulary, VocabularyError, read_settings
from pdjax.web import bind, say, serve


def main(arguments: list[str]) -> int:
    """Run until told to stop, or until the leader ends; returns the exit code: 2 if it could not start."""
    parser = argparse.ArgumentParser(prog="python -m pdjax.server", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="the leader's Unix socket")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="port to bind; 0: any (default: %(default)s)")
    parser.add_argument("--model-folder", type=Path, required=True, help="the folder with tokenizer.json")
    parser.add_argument("--served-model-name", help="the name clients ask for (default: the folder's name)")
    args = parser.parse_args(arguments)
    try:
        return uvloop.run(_run(args))
    except (OSError, VocabularyError) as error:
        say("frontend", str(error))
        return 2


async def _run(args: argparse.Namespace) -> int:
    try:
        leader = await Leader.connect(args.socket)  # first, so that the leader learns at once if the rest fails
    except OSError as error:
        raise OSError(f"cannot connect to the leader at {args.socket}: {error or type(error).__name__}") from error
    listener = bind(args.host, args.port)
    service = Service(
        leader=leader,
        vocabulary=Vocabulary.load(args.model_folder),
        template=ChatTemplate.load(args.model_folder, read_settings(args.model_folder)),
        metrics=Metrics(),
        model_name=args.served_model_name or args.model_folder.resolve().name,
        created=int(time.time()),
    )
    host, port = listener.getsockname()[:2]
    say("frontend", f"listening on http://{host}:{port}")
    gc.freeze()  # the vocabulary is large and stays: no collection needs to look at it
    return await serve(make_app(service), listener, leader, name="frontend")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
