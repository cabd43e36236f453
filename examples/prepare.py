"""The gateway's preprocessing in your own Python process: prompts, patches, no server.

    python examples/prepare.py [PICTURE]

Prints what a worker would be sent for one question about a picture.
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from m3stack.checkpoints import builtin_checkpoint
from m3stack.prepare import Preparer


def drawn_picture() -> bytes:
    """A red square on blue, as PNG."""
    picture = Image.new("RGB", (320, 200), "blue")
    ImageDraw.Draw(picture).rectangle((60, 40, 160, 140), fill="red")
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return encoded.getvalue()


def main() -> int:
    data = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else drawn_picture()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is in this picture?"},
    ]
    preparer = Preparer(builtin_checkpoint("tiny"))
    request, fingerprint = preparer.chat({"messages": [{"role": "user", "content": content}]})

    (item,) = request.media
    assert item.patches is not None
    t, h, w = item.grid_thw
    print(f"model fingerprint  {fingerprint.hex()[:16]}...")
    print(f"prompt             {len(request.prompt_token_ids)} tokens")
    print(f"picture            {t} x {h} x {w} patches, {len(item.patches)} bytes of u8")
    print(f"placeholders       {item.spans[0].length} at {item.spans[0].offset}")
    print("the prompt begins and ends with")
    print(repr(preparer.detokenize(list(request.prompt_token_ids[:12]))))
    print(repr(preparer.detokenize(list(request.prompt_token_ids[-12:]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
