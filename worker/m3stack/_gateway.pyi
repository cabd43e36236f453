"""The gateway's own code, callable from Python (compiled from `gateway/python`)."""

from os import PathLike

__version__: str

class RefusedError(Exception):
    """The gateway refuses the request; args: message, param or None, code, HTTP status."""

class Preparer:
    """Prepares requests for one checkpoint, by the code the gateway itself runs.

    Raises:
        ValueError: the checkpoint directory cannot be used; the text says why.
    """

    def __new__(cls, model_path: str | PathLike[str]) -> Preparer: ...
    def prepare_chat(self, body: bytes) -> tuple[bytes, list[memoryview]]:
        """Serialized `GenerateHeader` (no request id) and patch bytes of each media item; a
        picture's are read where the gateway keeps them.

        Raises:
            RefusedError: as the gateway would refuse the request.
        """

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, control tokens in it meant as such."""

    def detokenize(self, token_ids: list[int]) -> str:
        """Text of ids, control tokens shown."""

    def preprocess_image(
        self,
        data: bytes,
        *,
        detail: str | None = None,
        max_long_side_pixel: int | None = None,
    ) -> tuple[bytes, tuple[int, int, int]]:
        """u8 patch rows [t*h*w, 3*1*14*14] of a picture's file bytes, and the grid (t, h, w)."""

    def preprocess_video(
        self,
        data: bytes,
        *,
        detail: str | None = None,
        max_long_side_pixel: int | None = None,
        fps: float | None = None,
    ) -> tuple[bytes, tuple[int, int, int], list[int], list[float]]:
        """u8 patch rows [t*h*w, 3*2*14*14] of a clip's file bytes, the grid (t, h, w), the numbers
        of the frames taken, the seconds at which each temporal patch begins.
        """

    def patch_layout(self) -> tuple[int, int, int]:
        """Side of a patch, frames in a temporal patch, side of a merged square of patches."""

    def preprocess_frames(
        self, frames: list[bytes], width: int, height: int
    ) -> tuple[bytes, tuple[int, int, int]]:
        """u8 patch rows [t*h*w, 3*2*14*14] of RGB frames, and the grid (t, h, w)."""

def serve(arguments: list[str]) -> int:
    """Runs the gateway until SIGTERM or SIGINT; gives its exit code."""
