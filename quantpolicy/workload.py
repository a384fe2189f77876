"""From pixels to activation rows: the workload of a request, and how rows follow it."""

from __future__ import annotations

from dataclasses import dataclass

from quantpolicy.errors import RequestError
from quantpolicy.plan import Workload
from quantpolicy.request import Request
from quantpolicy.rule_schema import Geometry

MOST_TOKENS = 2**31 - 1  # rows are indexed by 32 bits, and the bytes of all estimates stay exact


@dataclass(frozen=True, slots=True)
class RowScale:
    """How the rows of an inventory, taken at the declared inputs, follow the workload.

    Args:
        declared_rows: rows of the image stream at the declared inputs.
        difference: rows that the workload has more (or fewer).
        batch: samples of one forward at the declared inputs.
    """

    declared_rows: int = 0
    difference: int = 0
    batch: int = 1

    def apply(self, rows: int | None) -> int | None:
        """Return the rows at the workload; streams shorter than the image's do not follow it."""
        if rows is None or not self.difference or rows < self.declared_rows:
            return rows
        return rows + self.difference

    def of_sample(self, rows: int) -> int:
        """Return the rows of one sample at the workload, where ``rows`` were taken."""
        if not self.difference or rows < self.declared_rows // self.batch:
            return rows
        return rows + self.difference // self.batch

    def stretch(self, size: int) -> float:
        """Return a size at the workload that follows the rows of the image stream."""
        if not self.difference:
            return size
        return size * (self.declared_rows + self.difference) / self.declared_rows

    def fewest(self, rows: int | None) -> int | None:
        """Return the fewest rows that a forward of the workload can have where ``rows`` are taken.

        It is one sample's alone when nothing guides it, and what is joined to the image's tokens
        can be shorter than declared.
        """
        if rows is None:
            return None
        if self.declared_rows and rows >= self.declared_rows:
            rows = self.declared_rows + self.difference
        return rows // self.batch


def plan_workload(
    geometry: Geometry | None, request: Request, family: str
) -> tuple[Workload | None, RowScale]:
    """Return the workload that the request describes, and how rows follow it.

    Raises:
        RequestError: resolution and frames do not describe an input of this family.
    """
    if geometry is None:
        return None, RowScale()
    declared_rows = geometry.image_tokens * geometry.batch
    if request.resolution is None and request.frames is None:
        declared = Workload(image_tokens=geometry.image_tokens, batch=geometry.batch, declared=True)
        return declared, RowScale(declared_rows, batch=geometry.batch)
    tokens = _image_tokens(geometry, request, family)
    workload = Workload(image_tokens=tokens, batch=geometry.batch, declared=False)
    difference = tokens * geometry.batch - declared_rows
    return workload, RowScale(declared_rows, difference, geometry.batch)


def _image_tokens(geometry: Geometry, request: Request, family: str) -> int:
    size = request.width_height
    makes_images = geometry.temporal_stride == 1 and geometry.temporal_patch == 1
    if size is None:
        raise RequestError(
            "frames",
            f"{request.frames} frames without a resolution",
            allowed=f"the tokens of {family} follow from both",
            remedy="give --resolution WIDTHxHEIGHT too",
        )
    if makes_images and request.frames not in (None, 1):
        raise RequestError(
            "frames",
            f"{request.frames} frames, but {family} makes single images",
            remedy="leave --frames out",
        )
    if not makes_images and request.frames is None:
        raise RequestError(
            "resolution",
            f"{request.resolution} without a number of frames",
            allowed=f"the tokens of {family} follow from both",
            remedy="give --frames too",
        )
    pixels = geometry.spatial_stride * geometry.spatial_patch
    latent_frames = ((request.frames or 1) - 1) // geometry.temporal_stride + 1
    steps = max(1, latent_frames // geometry.temporal_patch)
    tokens = (size[0] // pixels) * (size[1] // pixels) * steps
    if tokens == 0:
        raise RequestError(
            "resolution",
            f"{request.resolution} is less than one token of {family}",
            allowed=f"width and height of at least {pixels} pixels",
            remedy="give a larger resolution",
        )
    if tokens > MOST_TOKENS:
        raise RequestError(
            "resolution",
            f"{request.resolution} makes {tokens} image tokens of {family}",
            allowed=f"at most {MOST_TOKENS}",
            remedy="give a smaller resolution or fewer frames",
        )
    return tokens
