"""verify: is an artifact whole, and whose is it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  accel-compile verify ./artifact --key their-key.pub
"""


def verify(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="An artifact.")],
    key: Annotated[
        Path, typer.Option(metavar="FILE", help="Public Ed25519 key of the signer: OpenSSH or PEM.")
    ],
) -> None:
    """Check an artifact's signature and all its files.

    Exits with 1 where it is not signed with the key, or a file was changed.
    """
    from accel.runtime.artifact.artifact import open_artifact

    artifact = open_artifact(path, public_key=key)
    typer.echo(f"{path}: signed with {artifact.signer}, {len(artifact.files) + 1} files as signed")
