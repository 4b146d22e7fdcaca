"""Converts our own SVG to png or pdf without a system package: typst reads SVG and ships its
fonts.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from distsim.common.errors import EnvironmentFault, raise_if_out_of_memory
from distsim.common.installation import install_command

#: Two pixels of a png for each of the svg: sharp where screens are.
_PNG_DPI = 192.0
_TYPST_PAGE = '#set page(width: auto, height: auto, margin: 0pt)\n#image("picture.svg")\n'


def convert_svg(svg: str, fmt: Literal["png", "pdf"], dpi: float = _PNG_DPI) -> bytes:
    """The picture as ``png`` or ``pdf``. The same picture gives the same bytes on a machine with
    the same fonts.

    Raises EnvironmentFault where typst is missing or cannot draw it.
    """
    try:
        import typst
    except (ImportError, OSError) as error:
        raise_if_out_of_memory(error)
        raise EnvironmentFault(
            f"writing {fmt} needs typst, which cannot be loaded: {error}",
            f"{install_command('pictures')}; --format svg works without it",
        ) from None
    with TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "picture.svg").write_text(svg, encoding="utf-8")
        (root / "page.typ").write_text(_TYPST_PAGE, encoding="utf-8")
        try:
            return bytes(
                typst.compile(str(root / "page.typ"), root=folder, format=fmt, ppi=dpi, timestamp=0)
            )
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise EnvironmentFault(
                f"typst cannot write this {fmt}: {str(error)[:200]}", "use --format svg"
            ) from None
