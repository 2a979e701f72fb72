"""Signatures: what is signed loads, what was changed, replaced or left unsigned does not, and keys that cannot serve
are named with the next act.
"""

import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import accel
from accel import cli
from accel.ir.errors import AccelError, ArtifactError, InputError
from accel.runtime.artifact.artifact import copy_artifact, open_artifact

from .conftest import PROMPT, sealed

serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
SIGNATURE = "accel.json.sig"
FORMATS = {
    "openssh": (
        serialization.PrivateFormat.OpenSSH,
        serialization.PublicFormat.OpenSSH,
        serialization.Encoding.OpenSSH,
    ),
    "pem": (
        serialization.PrivateFormat.PKCS8,
        serialization.PublicFormat.SubjectPublicKeyInfo,
        serialization.Encoding.PEM,
    ),
}


def pair(folder, form="openssh", key=None, protect=None):
    """The paths of a private and its public key, written as a user has them."""
    private, public, encoding = FORMATS[form]
    key = key or ed25519.Ed25519PrivateKey.generate()
    protect = protect or serialization.NoEncryption()
    folder.mkdir(exist_ok=True)
    (folder / "key").write_bytes(key.private_bytes(serialization.Encoding.PEM, private, protect))
    (folder / "key.pub").write_bytes(key.public_key().public_bytes(encoding, public))
    return folder / "key", folder / "key.pub"


def call(*arguments):
    """One command, in this process: its exit code and all it printed."""
    found = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    return found.exit_code, found.output


@pytest.fixture
def signed(artifact, tmp_path):
    """A signed artifact, and its keys."""
    out = tmp_path / "artifact"
    shutil.copytree(artifact("base"), out)
    key, public = pair(tmp_path / "keys")
    assert call("sign", out, "--key", key)[0] == 0
    return out, key, public


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_signed_verifies(artifact, tmp_path, form):
    out = tmp_path / "artifact"
    shutil.copytree(artifact("base"), out)
    key, public = pair(tmp_path / "keys", form)
    assert call("verify", out, "--key", public)[0] == 1, "the control: not yet"
    assert call("sign", out, "--key", key)[0] == 0
    code, told = call("verify", out, "--key", public)
    assert code == 0 and "SHA256:" in told and "11 files" in told
    with accel.load(out, public_key=public) as model:
        assert len(model.generate(PROMPT, 4).tokens[0]) == 4
    run = ["run", out, "--tokens", "5,6", "--max-tokens", "2", "--public-key"]
    assert call(*run, public)[0] == 0
    other = pair(tmp_path / "other", form)[1]
    code, told = call(*run, other)
    assert code == 1 and "not signed with" in told and str(other) in told
    open_artifact(out)  # who gives no key asks for none


def test_other_tools_agree(signed):
    """ssh-keygen's keys are taken, and openssl verifies the signature."""
    out, key, public = signed
    for tool in ("ssh-keygen", "openssl"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    made = key.parent / "made"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", made], check=True)
    assert call("sign", out, "--key", made)[0] == 0
    assert call("verify", out, "--key", f"{made}.pub")[0] == 0
    shown = subprocess.run(["ssh-keygen", "-lf", made], check=True, capture_output=True, text=True)
    assert shown.stdout.split()[1] in call("verify", out, "--key", f"{made}.pub")[1]
    found = serialization.load_ssh_public_key(made.with_suffix(".pub").read_bytes())
    pem = FORMATS["pem"]
    (key.parent / "pem").write_bytes(found.public_bytes(pem[2], pem[1]))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", key.parent / "pem", "-rawin"]
    command += ["-in", out / "accel.json", "-sigfile", out / SIGNATURE]
    assert "Success" in subprocess.run(command, capture_output=True, text=True).stdout


def damage(name, at=-1):
    def change(out):
        data = bytearray((out / name).read_bytes())
        data[at] ^= 1
        (out / name).write_bytes(data)

    return change


def resealed(out):
    damage("weights.bin")(out)
    sealed(out)


CHANGES = {
    "unsigned": (lambda out: (out / SIGNATURE).unlink(), "is not signed"),
    "manifest": (damage("accel.json"), "not signed with"),
    "one space more": (lambda out: (out / "accel.json").open("a").write(" "), "not signed with"),
    "resealed": (resealed, "not signed with"),
    "signature": (damage(SIGNATURE), "not signed with"),
    "short": (lambda out: (out / SIGNATURE).write_bytes(b"x"), "not signed with"),
    "empty": (lambda out: (out / SIGNATURE).write_bytes(b""), "not signed with"),
    "huge": (lambda out: os.truncate(out / SIGNATURE, 1 << 40), "not signed with"),
    "folder": (lambda out: ((out / SIGNATURE).unlink(), (out / SIGNATURE).mkdir()), "is not signed"),
    "fifo": (lambda out: ((out / SIGNATURE).unlink(), os.mkfifo(out / SIGNATURE)), "is not signed"),
    "weights": (damage("weights.bin"), "weights.bin"),
    "not even JSON": (lambda out: (out / "accel.json").write_text("["), "not signed with"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_refused(signed, name):
    out, _, public = signed
    change, words = CHANGES[name]
    change(out)
    with pytest.raises(ArtifactError, match=words):
        accel.load(out, public_key=public)
    code, told = call("verify", out, "--key", public)
    assert code == 1 and words in told


def test_nothing_is_parsed_before(signed, monkeypatch):
    """The manifest's bytes are compared before they are read as JSON, and no other file is opened."""
    from accel.runtime.artifact import artifact as module

    out, _, public = signed
    damage("accel.json")(out)
    for name in ("parse", "read_graph", "_hashes"):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it was parsed"))
    monkeypatch.setattr(module.json, "loads", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(ArtifactError, match="not signed with"):
        open_artifact(out, public_key=public)


def test_a_copy_stays_signed_and_a_build_does_not(signed, artifact, tmp_path):
    out, _, public = signed
    with accel.load(out) as model:
        model.save(tmp_path / "saved")
    open_artifact(tmp_path / "saved", public_key=public)
    copy_artifact(
        open_artifact(artifact("int4")), out
    )  # the signature is the old artifact's, not a user's file
    assert SIGNATURE not in os.listdir(out)
    with pytest.raises(ArtifactError, match="is not signed"):
        open_artifact(out, public_key=public)


def test_an_artifact_that_is_damaged_is_not_signed(signed):
    out, key, _ = signed
    (out / SIGNATURE).unlink()
    damage("weights.bin")(out)
    code, told = call("sign", out, "--key", key)
    assert code == 1 and "weights.bin" in told and SIGNATURE not in os.listdir(out)


def test_keys_that_cannot_serve(signed, tmp_path):
    out, key, public = signed
    before = (out / SIGNATURE).read_bytes()
    some = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = pair(tmp_path / "pem", "pem", protect=serialization.BestAvailableEncryption(b"secret"))[0]
    other, others_public = pair(tmp_path / "rsa", key=some)
    (tmp_path / "text").write_text("not a key")
    (tmp_path / "empty").write_text("")
    wrong = {
        pem: "ssh-keygen -p",
        other: "Ed25519",
        public: "is a public key",
        tmp_path / "text": "is not a private key",
        tmp_path / "empty": "is not a private key",
        tmp_path / "gone": "does not exist",
        tmp_path: "is a folder",
        "/dev/zero": "is not a private key",
    }
    if shutil.which("ssh-keygen"):
        locked = tmp_path / "locked"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True
        )
        wrong[locked] = "ssh-keygen -p"
    for path, words in wrong.items():
        code, told = call("sign", out, "--key", path)
        assert code == 1 and words in told and str(path) in told, (path, told)
    for path, words in {
        others_public: "Ed25519",
        key: "is a private key",
        tmp_path / "text": "is not a public key",
        tmp_path / "gone": "does not exist",
        tmp_path: "is a folder",
    }.items():
        with pytest.raises(InputError, match=words):
            accel.load(out, public_key=path)
    assert (out / SIGNATURE).read_bytes() == before


def test_a_key_where_none_can_apply(signed, tmp_path):
    _, _, public = signed
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code, told = call("run", tmp_path / "model", "--tokens", "5", "--public-key", public)
    assert code == 1 and "--public-key" in told and "is a model directory" in told


def test_without_the_package(signed, monkeypatch):
    out, key, public = signed
    for name in [m for m in sys.modules if m.split(".")[0] == "cryptography"] + ["cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    for act in (
        lambda: accel.load(out, public_key=public),
        lambda: open_artifact(out, public_key=public),
    ):
        with pytest.raises(AccelError, match=r"'\.\[sign\]'"):
            act()
    assert "'.[sign]'" in call("sign", out, "--key", key)[1]
    open_artifact(out)
