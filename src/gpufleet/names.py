"""Which kernel does this name mean, and which could have been meant?"""

from __future__ import annotations

from collections.abc import Collection

from gpufleet.errors import ImageError


def find_kernel(name: str, names: Collection[str], origin: str) -> str:
    """Return the kernel called `name`, or the only C++ kernel whose name without its mangling is that.

    Raises
    ------
    ImageError
        If there is none, with the names that there are, the closest first; or if there are several.
    """
    if name in names:
        return name
    meant = [mangled for mangled in names if base_name(mangled) == name]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ImageError(
            f"{origin} has {len(meant)} kernels called {name!r}: say which, by its mangled name: "
            f"{', '.join(sorted(meant))}"
        )
    if not names:
        raise ImageError(
            f"{origin} has no kernel {name!r}, and no other: is it __global__, and a template instantiated?"
        )
    raise ImageError(f"{origin} has no kernel {name!r}; it has {_listed(name, names)}")


def base_name(mangled: str) -> str:
    """Return a C++ function's own name, without namespaces, template arguments and parameter types.

    As the Itanium ABI (https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling) writes it:
    ``_Z5saxpyifPKfPf``, ``_ZN2ns5innerEi``, ``_Z4tmplIiEvPT_S0_``; anything else comes back as it is.
    """
    if not mangled.startswith("_Z"):
        return mangled
    at = 2
    if mangled[at : at + 1] == "N":
        at += 1
    name = mangled
    while at < len(mangled):
        if mangled[at] in "LKVr":  # internal linkage, and qualifiers
            at += 1
            continue
        end = at
        while end < len(mangled) and mangled[end].isdecimal():
            end += 1
        if end == at:
            break
        at = end + int(mangled[at:end])
        name = mangled[end:at]
        if mangled[2] != "N":
            break
    return name


MOST_NAMES = 20


def _listed(name: str, names: Collection[str]) -> str:
    import difflib  # only for an error

    plain = {base_name(each): each for each in names}
    written = (
        name.partition("<")[0].partition("(")[0].rpartition("::")[2].strip()
    )  # ns::scale<float>(float *)
    close = [plain[each] for each in difflib.get_close_matches(written, plain, n=3)]
    others = [each for each in names if each not in close]
    shown = (close + others)[:MOST_NAMES]
    more = len(names) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more" if more else "")
    return listed + (f" (did you mean {base_name(close[0])!r}?)" if close else "")
