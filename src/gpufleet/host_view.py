"""How does NumPy see page-locked and managed memory?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Bytes:
    """What NumPy is shown: not the owner itself, whose buffer protocol is made from this array."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def host_view(owner: Any, address: int, nbytes: int) -> NDArray[Any]:
    """Return memory as an array of bytes, which keeps `owner` alive."""
    import numpy as np

    return np.asarray(_Bytes(owner, address, nbytes))
