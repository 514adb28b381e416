"""``python -m pdjax.launch convert``: a GGUF file or a Hugging Face folder becomes a model folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from pdjax.models.errors import ModelError
from pdjax.models.publishing import check_destination


def convert(
    source: Path, destination: Path, *, dtype: str | None = None, force: bool = False, progress: bool = True
) -> None:
    """Convert `source` (a GGUF file, or a folder with config.json and safetensors) into the folder `destination`.

    `dtype` (float32, bfloat16) is that of the stored weights; None keeps the source's (float32 for a GGUF file).

    Raises:
        ModelError: with a sentence for the user.
    """
    # These import JAX, which must not happen where a command line is only parsed.
    from pdjax.models.gguf import GGUFModel
    from pdjax.models.huggingface import HuggingFaceModel
    from pdjax.models.names import parameter_sources
    from pdjax.models.writing import Origin, write_model

    check_destination(destination, force=force)
    if not source.exists():
        raise ModelError(f"{source} does not exist; --from takes a GGUF file or a Hugging Face folder")
    model = HuggingFaceModel(source) if source.is_dir() else GGUFModel(source)
    config = model.config
    total = len(parameter_sources(config))
    with tqdm(total=total, desc=f"converting {source.name}", unit="tensor", disable=not progress) as bar:
        write_model(
            destination,
            config=config,
            tensors=model,
            tokenizer=model.tokenizer_files(),
            origin=Origin(source.resolve().name, model.sha256()),
            dtype=dtype,
            force=force,
            on_parameter=lambda name: bar.update(),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("--from", dest="source", type=Path, required=True, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--to", dest="destination", type=Path, required=True, help="the model folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="store weights so; default: as they are")
    parser.add_argument("--force", action="store_true", help="replace a model folder that is there already")


def main(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code, 2 for what the user can put right."""
    try:
        convert(args.source, args.destination, dtype=args.dtype, force=args.force)
    except ModelError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    print(args.destination)
    return 0


if __name__ == "__main__":  # as `fetch` starts it: the whole command line imports more than converting needs
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
