"""Asks the worker's health service over TLS: exit status 0 if it serves, else 1 and the reason.

Usage: probe.py HOST:PORT SERVER_NAME [FOLDER]

FOLDER holds the worker's own tls.crt and tls.key, and ca.crt if it asks callers for a certificate:
then its certificate must be good for clients as well.
"""

import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

target, server_name, *folders = sys.argv[1:]
folder = Path(folders[0] if folders else "/etc/m3stack-tls")
authority = folder / "ca.crt"
certificate = (folder / "tls.crt").read_bytes()
credentials = grpc.ssl_channel_credentials(
    root_certificates=authority.read_bytes() if authority.is_file() else certificate,
    private_key=(folder / "tls.key").read_bytes(),
    certificate_chain=certificate,
)
options = [("grpc.ssl_target_name_override", server_name)]
serving = health_pb2.HealthCheckResponse.SERVING
with grpc.secure_channel(target, credentials, options=options) as channel:
    request = health_pb2.HealthCheckRequest()
    try:
        status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=8).status
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
if status != serving:
    sys.exit(f"the worker is {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")
