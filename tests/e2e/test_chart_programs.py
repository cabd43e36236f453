"""The programs that the chart carries, run as it runs them: the probe, and `helm test`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from m3stack.local_ports import free_port
from tests.e2e.conftest import MODEL_NAME, Server, Stack, wait_for

FILES = Path(__file__).parents[2] / "deploy" / "helm" / "m3stack" / "files"
NAME = "worker.m3stack.internal"


def certificate(folder: Path) -> Path:
    """A directory laid out like a TLS secret: an authority, and one it has signed for both ends."""
    folder.mkdir()
    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    sign = ["x509", "-req", "-days", "1", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
    (folder / "uses").write_text(
        f"subjectAltName=DNS:{NAME},DNS:localhost,IP:127.0.0.1\n"
        "extendedKeyUsage=serverAuth,clientAuth\n"
    )
    for command in (
        [*new, "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt"],
        [*new, "-subj", "/CN=m3stack", "-keyout", "tls.key", "-out", "asked"],
        [*sign, "-in", "asked", "-extfile", "uses", "-out", "tls.crt"],
    ):
        subprocess.run(
            ["openssl", *command], cwd=folder, check=True, capture_output=True, timeout=100
        )
    return folder


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A file of the chart, as `python -c` or by its name."""
    command = [sys.executable, str(FILES / program), *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=200
    )


def test_probe_and_test_speak_tls_with_certificates(stack: Stack, tmp_path: Path) -> None:
    folder = certificate(tmp_path / "both")
    worker = stack.worker("--tls-dir", str(folder))
    address, admin = f"localhost:{free_port()}", f"127.0.0.1:{free_port()}"
    flags = ["--workers", f"https://{worker.address}", "--worker-tls-dir", str(folder)]
    flags += ["--tls-dir", str(folder), "--admin-listen", admin]
    server = stack.start("gateway", address, "", *flags)
    wait_for(replace(server, address=admin), "/ready")

    # what it is asked of while it is ready, by another name, and when it is gone
    assert run("probe.py", worker.address, NAME, str(folder)).returncode == 0
    other = run("probe.py", worker.address, "somebody.else", str(folder))
    assert (other.returncode, "Traceback" in other.stderr) == (1, False)
    asked = {
        "M3STACK_URL": f"https://{address}",
        "M3STACK_MODEL": MODEL_NAME,
        "SSL_CERT_FILE": str(folder / "ca.crt"),
    }
    done = run("chat_once.py", **asked, M3STACK_CLIENT_TLS=str(folder))
    assert (done.returncode, done.stdout) == (0, "the model answers\n"), done.stderr
    # without a certificate, the gateway does not even listen
    refused = run("chat_once.py", **asked)
    assert (refused.returncode, "Traceback" in refused.stderr) == (1, False)
    assert "cannot be reached" in refused.stderr

    worker.stop()
    gone = run("probe.py", worker.address, NAME, str(folder))
    assert gone.returncode == 1
    assert "UNAVAILABLE" in gone.stderr
    assert "Traceback" not in gone.stderr
    failed = run("chat_once.py", **asked, M3STACK_CLIENT_TLS=str(folder))
    assert failed.returncode == 1
    assert "the gateway answered 503" in failed.stderr


def test_what_the_gateway_says_against_it_is_told(gateway: Server) -> None:
    asked = {"M3STACK_URL": gateway.url, "M3STACK_MODEL": "another"}
    done = run("chat_once.py", **asked)
    assert done.returncode == 1
    assert "the gateway answered 404" in done.stderr
