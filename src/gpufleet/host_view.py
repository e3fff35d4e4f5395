"""How does NumPy see memory that is not its own?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Shown:
    """What NumPy is shown: not the owner itself, whose buffer protocol may be made from this array."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def array_over(owner: Any, interface: dict[str, Any]) -> NDArray[Any]:
    """Return the array that an `__array_interface__` describes, which keeps `owner` alive."""
    import numpy as np

    return np.asarray(_Shown(owner, interface))


def owner_of(array: Any) -> Any:
    """Return the owner of the memory that an array is a view of, if it came from here; else None."""
    import numpy as np

    while isinstance(array, (np.ndarray, memoryview)):
        array = array.obj if isinstance(array, memoryview) else array.base
    return array.owner if isinstance(array, _Shown) else None


def host_view(owner: Any, address: int, nbytes: int) -> NDArray[Any]:
    """Return memory as an array of bytes, which keeps `owner` alive."""
    return array_over(owner, byte_interface(address, nbytes))


def byte_interface(address: int, nbytes: int) -> dict[str, Any]:
    """Describe bytes as `__array_interface__` and `__cuda_array_interface__` do."""
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
