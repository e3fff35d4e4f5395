"""The one error of this package."""

from __future__ import annotations

from gpufleet.errors import ImageError


class FatbinError(ImageError):
    """A fatbin, cubin or host binary that is damaged, or does not hold what was asked for.

    It is an `ImageError`, and so a `ValueError`.
    """
