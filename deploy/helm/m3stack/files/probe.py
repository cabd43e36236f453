"""Asks the worker's health service over TLS: exit status 0 if it serves.

Usage: probe.py HOST:PORT SERVER_NAME
"""

import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

target, server_name = sys.argv[1:]
folder = Path("/etc/m3stack-tls")
authority = folder / "ca.crt"
certificate = (folder / "tls.crt").read_bytes()
credentials = grpc.ssl_channel_credentials(
    root_certificates=authority.read_bytes() if authority.is_file() else certificate,
    private_key=(folder / "tls.key").read_bytes(),
    certificate_chain=certificate,
)
options = [("grpc.ssl_target_name_override", server_name)]
with grpc.secure_channel(target, credentials, options=options) as channel:
    request = health_pb2.HealthCheckRequest()
    status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=8).status
sys.exit(status != health_pb2.HealthCheckResponse.SERVING)
