"""Asks a served model for one token through the gateway; exit status 1 and a reason otherwise."""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

body = {
    "model": os.environ["M3STACK_MODEL"],
    "messages": [{"role": "user", "content": "Say yes."}],
    "max_tokens": 1,
}
request = urllib.request.Request(
    os.environ["M3STACK_URL"] + "/v1/chat/completions",
    data=json.dumps(body).encode(),
    headers={"content-type": "application/json"},
)
if os.environ.get("M3STACK_API_KEY"):
    request.add_header("authorization", "Bearer " + os.environ["M3STACK_API_KEY"])
context = None
if request.type == "https":
    context = ssl.create_default_context()
    if os.environ.get("M3STACK_CLIENT_TLS"):
        folder = os.environ["M3STACK_CLIENT_TLS"]
        context.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
try:
    with urllib.request.urlopen(request, timeout=120, context=context) as reply:
        answer = json.load(reply)
except urllib.error.HTTPError as refusal:
    sys.exit(f"the gateway answered {refusal.code}: {refusal.read(2000).decode(errors='replace')}")
except OSError as error:
    sys.exit(f"the gateway cannot be reached: {error}")
if answer["usage"]["completion_tokens"] != 1:
    sys.exit(f"one token was asked for, usage says {answer['usage']}")
print("the model answers")
