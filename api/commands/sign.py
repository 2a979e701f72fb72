"""sign: let others see that an artifact is yours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  accel-compile sign ./artifact --key my-key
  ssh-keygen -t ed25519 -N "" -f my-key          # makes a key
  accel-compile verify ./artifact --key my-key.pub
"""


def sign(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="An artifact.")],
    key: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Private Ed25519 key without a passphrase: OpenSSH or PEM."
        ),
    ],
) -> None:
    """Sign an artifact with your key.

    Writes accel.json.sig beside accel.json, which holds the checksums of all files. Those are checked
    first. A later build of the artifact removes the signature.
    """
    from accel.runtime.artifact.artifact import open_artifact
    from accel.runtime.artifact.signature import SIGNATURE
    from accel.runtime.artifact.signature import sign as signed

    artifact = open_artifact(path)
    fingerprint = signed(artifact.path, key)
    typer.echo(f"{path / SIGNATURE}: signed with {fingerprint}")
