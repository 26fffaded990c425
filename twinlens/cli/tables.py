"""Plain text tables and units."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lays rows out in columns: the first flush left, the others right. The first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with three digits that count.

    >>> milliseconds(0.0123456), milliseconds(2.5)
    ('12.3 ms', '2,500 ms')
    """
    value = seconds * 1000
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def share(part: int, whole: int) -> str:
    """How much of a whole, in per cent; a dash where there is no whole.

    >>> share(1, 4), share(0, 0)
    ('25%', '–')
    """
    return f"{100 * part / whole:.0f}%" if whole else "–"


def size(count: int) -> str:
    """Bytes in the largest fitting binary unit.

    >>> size(3 << 20), size(100)
    ('3.0 MiB', '100 B')
    """
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
