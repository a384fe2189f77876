"""From pixels to activation rows: the workload of a request, and how rows follow it."""

from __future__ import annotations

from dataclasses import dataclass

from quantpolicy.errors import RequestError
from quantpolicy.plan import Workload
from quantpolicy.request import Request
from quantpolicy.rule_schema import Geometry


@dataclass(frozen=True, slots=True)
class RowScale:
    """How the rows of an inventory, taken at the declared inputs, follow the workload.

    Args:
        declared_rows: rows of the image stream at the declared inputs.
        difference: rows that the workload has more (or fewer).
    """

    declared_rows: int = 0
    difference: int = 0

    def apply(self, rows: int | None) -> int | None:
        """Return the rows at the workload; streams shorter than the image's do not follow it."""
        if rows is None or not self.difference or rows < self.declared_rows:
            return rows
        return rows + self.difference


def plan_workload(
    geometry: Geometry | None, request: Request, family: str
) -> tuple[Workload | None, RowScale]:
    """Return the workload that the request describes, and how rows follow it.

    Raises:
        RequestError: resolution and frames do not describe an input of this family.
    """
    if geometry is None:
        return None, RowScale()
    if request.resolution is None and request.frames is None:
        declared = Workload(image_tokens=geometry.image_tokens, batch=geometry.batch, declared=True)
        return declared, RowScale()
    tokens = _image_tokens(geometry, request, family)
    declared_rows = geometry.image_tokens * geometry.batch
    workload = Workload(image_tokens=tokens, batch=geometry.batch, declared=False)
    return workload, RowScale(declared_rows, tokens * geometry.batch - declared_rows)


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
    return tokens
